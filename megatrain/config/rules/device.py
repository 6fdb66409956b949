"""Rules about devices: GPUs, ranks, compilation, FP8, --deterministic-mode (`training/launch/ranks.py`)."""

from collections.abc import Callable, Iterator
from typing import Final

from megatrain.config.derive.fp8 import (
    BLOCKWISE_CAPABILITY,
    GPU_BLOCK_SIZE,
    GROUPED_CAPABILITY,
    MIN_CAPABILITY,
    MIN_CAPABILITY_OF_MXFP8,
    MXFP8_BLOCK,
    NVFP4_BLOCK,
    PRODUCT_MULTIPLE,
    choice_of,
    fp8_recipes,
    gemm_sizes,
    recipe_of_flags,
)
from megatrain.config.derive.transformer_engine import TRANSFORMER_ENGINE, local_fp8_layers
from megatrain.config.errors import Problem
from megatrain.config.module_precision import digest_of
from megatrain.config.plan import Draft

_CUBLAS_WORKSPACES: Final = (":4096:8", ":16:8")

Problems = Iterator[Problem]


def device_is_available(draft: Draft) -> Problems:
    if draft.config.training.device == "cuda" and draft.facts.device != "cuda":
        yield Problem(
            "--device cuda requires a GPU, and none was found", "use --device cpu, or check `nvidia-smi`"
        )


def each_rank_has_a_gpu(draft: Draft) -> Problems:
    ranks, gpus = draft.facts.ranks_per_node, draft.facts.devices_per_node
    if draft.config.training.device == "cuda" and ranks is not None and gpus is not None and ranks > gpus:
        yield Problem(
            f"{ranks} ranks were started on a node with {gpus} visible GPUs",
            f"use torchrun --nproc-per-node {gpus}, or make more GPUs visible (CUDA_VISIBLE_DEVICES); without torchrun, where each"
            " rank sees a GPU of its own, set LOCAL_RANK=0 and LOCAL_WORLD_SIZE=1 next to RANK and WORLD_SIZE",
        )


def world_size_is_for_dry_runs(draft: Draft) -> Problems:
    size = draft.config.parallel.world_size
    if size is not None and draft.config.training.dry_run is None:
        yield Problem(
            f"--world-size {size} requires --dry-run, since a run has the ranks that the launcher starts",
            "add --dry-run, or remove --world-size and start the ranks (torchrun --nproc-per-node, --nnodes)",
        )


def gpus_require_nccl(draft: Draft) -> Problems:
    if draft.config.training.device == "cuda" and draft.config.parallel.distributed_backend == "gloo":
        yield Problem(
            "--distributed-backend gloo is not supported together with --device cuda",
            "remove --distributed-backend (or set it to auto), or use --device cpu",
        )


def kernels_can_be_compiled(draft: Draft) -> Problems:
    """A dry run does not need the compiler; without a GPU, `device_is_available` reports the problem."""
    training = draft.config.training
    if (
        draft.config.training.device == draft.facts.device == "cuda"
        and training.compile
        and not (draft.facts.has_triton or training.dry_run)
    ):
        yield Problem(
            "compiling GPU kernels requires Triton, which is not installed",
            "install the triton version that this torch requires, or use --no-compile, which is slower",
        )


def cublas_is_deterministic(draft: Draft) -> Iterator[Problem]:
    given = draft.facts.cublas_workspace
    if _is_deterministic(draft) and given is not None and given not in _CUBLAS_WORKSPACES:
        yield Problem(
            f"--deterministic-mode: CUBLAS_WORKSPACE_CONFIG is {given!r}, with which GEMMs may be nondeterministic",
            f"unset CUBLAS_WORKSPACE_CONFIG, or set it to {_CUBLAS_WORKSPACES[0]}",
        )


def _is_deterministic(draft: Draft) -> bool:
    return draft.config.training.deterministic_mode and draft.config.training.device == "cuda"


def fp4_can_be_emulated(draft: Draft) -> Problems:
    precision, flag = draft.config.precision, f"--fp4-format {draft.config.precision.fp4_format}"
    if precision.fp4_format is None:
        return
    if precision.fp8_format is not None:
        yield Problem(
            f"{flag} and --fp8-format {precision.fp8_format} exclude each other", "remove --fp4-format"
        )
    elif precision.fp16:
        yield Problem(
            f"{flag} is not supported together with --fp16: FP4 gradients have scales of their own",
            "use --bf16",
        )
    elif draft.config.training.device == "cuda":
        yield Problem(
            f"{flag} is emulated on CPUs only: its products need Blackwell GPUs, and are not used there yet",
            "remove --fp4-format, and use --fp8-format hybrid --fp8-recipe tensorwise",
        )
    elif draft.config.model.multi_latent_attention or draft.config.experts.num_experts:
        yield Problem(
            f"{flag} is not supported together with --num-experts or --multi-latent-attention",
            "remove --fp4-format",
        )
    else:
        for what, flags, size in dict.fromkeys(gemm_sizes(draft, gathers_values=True)):
            if size % NVFP4_BLOCK:
                yield Problem(
                    f"{flag}: {size:g} {what} are not a multiple of {NVFP4_BLOCK}",
                    f"change {flags}, or remove --fp4-format",
                )


def fp8_recipe_is_supported(draft: Draft) -> Problems:
    precision = draft.config.precision
    if precision.fp8_format is None:
        return
    if "mxfp8" in _recipe_names(draft):
        yield from _problems_of_mxfp8(draft)
    if precision.fp16:
        yield Problem(
            "--fp8-format is not supported together with --fp16: FP8 gradients have scales of their own",
            "use --bf16",
        )


def _recipe_names(draft: Draft) -> set[str]:
    return {recipe.name for recipe in fp8_recipes(draft)}


def _fix_of(draft: Draft, recipe: str) -> str:
    """Return how to choose another recipe."""
    if draft.config.precision.fp8_recipe == recipe:
        return "use --fp8-recipe tensorwise"
    return "remove --te-precision-config-file, or choose tensorwise in the file"


def _problems_of_mxfp8(draft: Draft) -> Problems:
    """GPUs use the products of Transformer Engine, for all linear layers; a CPU emulates them."""
    flag, other = choice_of(draft, "mxfp8"), _fix_of(draft, "mxfp8")
    capability = draft.facts.device_capability
    reason = local_fp8_layers(draft)
    if draft.config.training.device != "cuda":
        return
    if capability is not None and capability < MIN_CAPABILITY_OF_MXFP8:
        yield Problem(
            f"{flag} requires Blackwell GPUs, and {draft.facts.device_name} is not one",
            f"{other}, or blockwise",
        )
    elif draft.derived.transformer_impl != TRANSFORMER_ENGINE:
        yield Problem(
            f"{flag} requires the linear layers of Transformer Engine ({draft.origins['derived.transformer_impl'].detail})",
            f"{other}, or --transformer-impl transformer_engine on a Blackwell GPU",
        )
    elif reason:
        yield Problem(
            f"{flag} requires the linear layers of Transformer Engine, and local supplies those after norms ({reason})",
            f"{other}, or remove {reason}",
        )


def fp8_products_can_run(draft: Draft) -> Problems:
    """GPUs need FP8 tensor cores, and sizes that these multiply; a CPU emulates the products."""
    capability, flag = draft.facts.device_capability, f"--fp8-format {draft.config.precision.fp8_format}"
    if draft.config.precision.fp8_format is None or draft.config.training.device != "cuda":
        return
    if capability is not None and capability < MIN_CAPABILITY:
        yield Problem(
            f"{flag} requires a GPU with FP8 tensor cores, and {draft.facts.device_name} has none",
            "remove --fp8-format, or use an Ada, Hopper or later GPU",
        )
    elif capability is not None and capability < GROUPED_CAPABILITY and draft.config.experts.num_experts:
        yield Problem(
            f"{flag} with --num-experts requires a Hopper or later GPU, and this is {draft.facts.device_name}",
            "remove --fp8-format",
        )
    names = _recipe_names(draft)
    if "blockwise" in names:
        yield from _blocks_can_be_multiplied(draft)
    multiple = MXFP8_BLOCK if "mxfp8" in names else PRODUCT_MULTIPLE
    for what, flags, size in dict.fromkeys(gemm_sizes(draft)):
        if size % multiple:
            yield Problem(
                f"{flag}: {size:g} {what} are not a multiple of {multiple}, as FP8 products require",
                f"change {flags}, or remove --fp8-format",
            )


def _blocks_can_be_multiplied(draft: Draft) -> Problems:
    """Return whether cuBLAS has products of these blocks on this GPU."""
    capability, size = draft.facts.device_capability, draft.config.precision.fp8_block_size
    if capability is not None and capability[0] != BLOCKWISE_CAPABILITY:
        flag, fix = choice_of(draft, "blockwise"), _fix_of(draft, "blockwise")
        yield Problem(f"{flag} requires a Hopper GPU, and this is {draft.facts.device_name}", fix)
    if size != GPU_BLOCK_SIZE:
        yield Problem(
            f"--fp8-block-size {size}: GPUs multiply blocks of {GPU_BLOCK_SIZE}",
            f"use --fp8-block-size {GPU_BLOCK_SIZE}",
        )


def modules_have_the_precision_of_the_file(draft: Draft) -> Problems:
    precision, modules = draft.config.precision, draft.derived.fp8_modules
    if modules is None:
        return
    flag = f"--te-precision-config-file {precision.te_precision_config_file}"
    paths = modules.linears
    correction = f"correct it (a path is {paths[0].path})," if paths else "the model has none:"
    for name, pattern, *_ in modules.unmatched:
        yield Problem(
            f"{flag}: matchers.{name}.pattern {pattern!r} matches no linear layer",
            f"{correction} set enabled: false, or remove --te-precision-config-file",
        )
    for first, second in modules.disagreeing:
        yield Problem(
            f"{flag}: {first} and {second} are computed together, and have different recipes",
            "let both match the same config, or remove --te-precision-config-file",
        )
        break
    if recipe_of_flags(draft) is None and modules.layers:
        yield Problem(
            f"{flag} has FP8 (override_nonquantized_autocast), and --fp8-format is not given",
            "use --fp8-format e4m3, and a last matcher with pattern '*' for other linear layers",
        )


def precision_file_has_its_digest(draft: Draft) -> Problems:
    """A saved configuration has the digest of its file."""
    precision, text = draft.config.precision, draft.facts.module_precision
    file, given = precision.te_precision_config_file, precision.te_precision_config_digest
    digest = digest_of(text) if file and text else None
    if given != digest and (text is not None or file is None):
        yield Problem(
            f"--te-precision-config-file {file or 'none'}: the digest is {digest or 'none'}, and"
            f" --te-precision-config-digest (from the saved configuration) is {given or 'none'}",
            "give --te-precision-config-file the file of that run, or remove --te-precision-config-digest",
        )


DEVICE_RULES: Final[tuple[Callable[[Draft], Problems], ...]] = (
    device_is_available,
    each_rank_has_a_gpu,
    world_size_is_for_dry_runs,
    gpus_require_nccl,
    kernels_can_be_compiled,
    cublas_is_deterministic,
    fp4_can_be_emulated,
    fp8_recipe_is_supported,
    fp8_products_can_run,
    modules_have_the_precision_of_the_file,
    precision_file_has_its_digest,
)
