"""FP8 and FP4: the layers that they cover, their recipes, and the sizes of their products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from megatrain.config.errors import Problem
from megatrain.config.model_spec.layer import LayerSpec
from megatrain.config.module_precision import Recipe, digest_of, linear_layers, recipes_of_modules
from megatrain.config.plan import DerivedValue, Draft, Plan
from megatrain.config.plan_note import PlanNote
from megatrain.config.registry import Notes, Problems, derives, note, rule, unproven
from megatrain.config.schema.optimizer import PrecisionConfig
from megatrain.config.subjects.transformer_engine import TRANSFORMER_ENGINE, local_fp8_layers

PRODUCT_MULTIPLE: Final = 16
"""Sizes of FP8 products on GPUs are multiples of this number."""
MIN_CAPABILITY: Final = (8, 9)
"""Compute capability of the first GPUs with FP8 tensor cores: Ada, Hopper."""
GROUPED_CAPABILITY: Final = (9, 0)
"""Compute capability of the first GPUs for which torch has grouped products in FP8: Hopper."""
BLOCKWISE_CAPABILITY: Final = 9
"""Major compute capability of the GPUs on which cuBLAS multiplies blocks with fp32 scales: Hopper."""
GPU_BLOCK_SIZE: Final = 128
"""Elements per block of these products."""
MXFP8_BLOCK: Final = 32
"""Values that share a scale of MXFP8."""
MIN_CAPABILITY_OF_MXFP8: Final = (10, 0)
"""Compute capability of Blackwell."""
NVFP4_BLOCK: Final = 16
"""Values that share a scale of NVFP4."""
FP8_RECIPES_WITH_ROWS: Final = ("tensorwise", "delayed", "blockwise", "nvfp4")
"""Recipes whose scales are the same under every layout. Their rows are in fp64, in which a split equals one process."""
_NO_FILE: Final = "--te-precision-config-file is not given, or not read"


def recipe_of_flags(draft: Draft | Plan) -> Recipe | None:
    """Return the recipe of --fp8-format or --fp4-format; None without them."""
    precision = draft.config.precision
    if precision.fp4_format is not None:
        return Recipe(precision.fp4_recipe, precision.fp4_format)
    return precision.fp8_format and Recipe(precision.fp8_recipe, precision.fp8_format)


def fp8_recipes(draft: Draft | Plan) -> set[Recipe]:
    """Return the recipes of all linear layers that have one."""
    recipe, modules = recipe_of_flags(draft), draft.derived.fp8_modules
    if recipe is None:
        return set()
    if modules is None:
        return {recipe}
    return {recipe for recipe in modules.by_path.values() if recipe is not None}


@derives("precision.te_precision_config_digest")
def te_precision_config_digest(draft: Draft) -> DerivedValue:
    path, text = draft.config.precision.te_precision_config_file, draft.facts.module_precision
    if path is None or text is None:
        return DerivedValue(None, _NO_FILE)
    return DerivedValue(digest_of(text), f"of {path}")


@rule
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


@derives("derived.fp8_modules")
def fp8_modules(draft: Draft) -> DerivedValue:
    """Derive the recipe of each linear layer from the file of --te-precision-config-file."""
    path, text = draft.config.precision.te_precision_config_file, draft.facts.module_precision
    if path is None or text is None:
        return DerivedValue(None, _NO_FILE)
    found = recipes_of_modules(
        text, draft.derived.model_spec, fp8_layers=_layers_of_flags(draft), recipe=recipe_of_flags(draft)
    )
    parts = [f"matcher {name} decides {count}" for name, count in found.deciding.items()]
    others = len(found.linears) - sum(found.deciding.values())
    return DerivedValue(found, f"by {path}: {', '.join((*parts, f'the flags {others}'))}")


@rule
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


@derives("derived.fp8_layers")
def fp8_layers(draft: Draft) -> DerivedValue:
    """Derive the layers with linear layers in FP8."""
    recipe, modules = recipe_of_flags(draft), draft.derived.fp8_modules
    if recipe is None:
        return DerivedValue((), "no --fp8-format")
    numbers = _layers_of_flags(draft) if modules is None else modules.layers
    flag = "--fp4-format" if recipe.name == "nvfp4" else "--fp8-format"
    return DerivedValue(numbers, f"{flag} {recipe.format}: {len(numbers)} layers")


def _layers_of_flags(draft: Draft) -> tuple[int, ...]:
    """Return the layers in FP8 by flags, as in Megatron-LM: layers of multi-token prediction always are."""
    precision, count = draft.config.precision, len(draft.derived.model_spec.layers)
    if recipe_of_flags(draft) is None:
        return ()
    first, last = 0, count
    if precision.first_last_layers_bf16:
        first, last = precision.num_layers_at_start_in_bf16, count - precision.num_layers_at_end_in_bf16
    return (*range(first, last), *range(count, len(draft.derived.model_spec.all_layers)))


def _recipe_names(draft: Draft) -> set[str]:
    return {recipe.name for recipe in fp8_recipes(draft)}


def _fix_of(draft: Draft, recipe: str) -> str:
    """Return how to choose another recipe."""
    if draft.config.precision.fp8_recipe == recipe:
        return "use --fp8-recipe tensorwise"
    return "remove --te-precision-config-file, or choose tensorwise in the file"


def choice_of(draft: Draft, recipe: str) -> str:
    """Return the flag that chooses a recipe in use: of all linear layers, or of single ones."""
    precision, flags = draft.config.precision, recipe_of_flags(draft)
    if flags is None or flags.name != recipe:
        return f"--te-precision-config-file {precision.te_precision_config_file}: fp8_quantization_recipe {recipe}"
    return f"--fp8-recipe {recipe}" if precision.fp4_format is None else f"--fp4-format {flags.format}"


@rule
def fp8_recipe_is_supported(draft: Draft) -> Problems:
    """GPUs use the products of Transformer Engine for MXFP8, for all linear layers; a CPU emulates them."""
    has_fp8, capability = draft.config.precision.fp8_format is not None, draft.facts.device_capability
    if not has_fp8 or "mxfp8" not in _recipe_names(draft) or draft.config.training.device != "cuda":
        return
    flag, other, reason = choice_of(draft, "mxfp8"), _fix_of(draft, "mxfp8"), local_fp8_layers(draft)
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


@rule
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


@rule
def fp4_can_be_emulated(draft: Draft) -> Problems:
    precision, flag = draft.config.precision, f"--fp4-format {draft.config.precision.fp4_format}"
    if precision.fp4_format is None:
        return
    if draft.config.training.device == "cuda":
        yield Problem(
            f"{flag} is emulated on CPUs only: its products need Blackwell GPUs, and are not used there yet",
            "remove --fp4-format, and use --fp8-format hybrid --fp8-recipe tensorwise",
        )
    else:
        for what, flags, size in dict.fromkeys(gemm_sizes(draft, gathers_values=True)):
            if size % NVFP4_BLOCK:
                yield Problem(
                    f"{flag}: {size:g} {what} are not a multiple of {NVFP4_BLOCK}",
                    f"change {flags}, or remove --fp4-format",
                )


def scale_blocks(draft: Draft) -> dict[str, int]:
    """Return the elements of a row that share a scale, by recipe, for the recipes in use that have blocks."""
    sizes = {"blockwise": draft.config.precision.fp8_block_size, "mxfp8": MXFP8_BLOCK, "nvfp4": NVFP4_BLOCK}
    return {name: sizes[name] for name, _ in sorted(fp8_recipes(draft)) if name in sizes}


class GemmSize(NamedTuple):
    """A size of a product on one rank."""

    what: str
    flags: str
    """The settings that decide it."""
    size: float


def gemm_sizes(draft: Draft, *, gathers_values: bool = False) -> Iterator[GemmSize]:
    """Yield the sizes of all products in FP8 layers; with `gathers_values`, casts follow the gather of sequence parallelism."""
    parallel, model = draft.config.parallel, draft.config.model
    tp = parallel.tensor_model_parallel_size
    ranks = parallel.context_parallel_size * (tp if parallel.sequence_parallel and not gathers_values else 1)
    samples, length = draft.config.training.micro_batch_size, draft.config.data.seq_length
    if not draft.derived.pack_group_sizes:  # whose rows are filled up
        flags = "--seq-length, --micro-batch-size"
        yield GemmSize("tokens of a micro-batch on a rank", flags, samples * length / ranks)
    yield GemmSize("channels of hidden states", "--hidden-size", model.hidden_size)
    for number in draft.derived.fp8_layers:
        layer = draft.derived.model_spec.all_layers[number]
        yield from _sizes_of(layer, model.hidden_size, tp, draft.derived.expert_tensor_parallel_size)


def split_sizes(draft: Draft) -> Iterator[GemmSize]:
    """Yield the sizes of the parts into which ranks split the matrices of FP8 layers: where blocks of scales begin."""
    parallel, data = draft.config.parallel, draft.config.data
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if cp > 1:  # a rank holds two chunks of each sample
        tokens = draft.config.training.micro_batch_size * data.seq_length / (2 * cp)
        yield GemmSize("tokens of a chunk of a micro-batch", "--seq-length, --context-parallel-size", tokens)
    for number in draft.derived.fp8_layers if tp > 1 else ():
        layer = draft.derived.model_spec.all_layers[number]
        for one in layer.linears(draft.config.model.hidden_size):
            if one.split == "inputs" and not one.num_experts:
                yield GemmSize(f"channels of {one.reads}", one.flags, one.local_inputs(tp))
            elif one.split == "outputs" and not one.num_experts:
                for piece in one.pieces:
                    what = piece.what or one.writes
                    yield GemmSize(f"channels of {what}", one.flags, piece.local_size(tp))


def _sizes_of(layer: LayerSpec, hidden_size: int, tp: int, etp: int) -> Iterator[GemmSize]:
    """Yield the sizes of inputs and outputs of a layer's GEMMs on one rank; the width of an MLP once, as it is read."""
    linears = layer.linears(hidden_size)
    are_read = {one.reads for one in linears}
    for one in linears:
        ranks = etp if one.num_experts else tp
        yield GemmSize(f"channels of {one.reads}", one.flags, one.local_inputs(ranks))
        if one.writes not in are_read:
            yield GemmSize(f"channels of {one.writes}", one.flags, one.local_outputs(ranks))


@note("nothing")
def block_size_without_effect(draft: Draft) -> Notes:
    precision = draft.config.precision
    has_blocks = precision.fp8_recipe == "blockwise" or "blockwise" in scale_blocks(draft)
    if precision.fp8_block_size != PrecisionConfig.fp8_block_size and not has_blocks:
        yield f"--fp8-block-size {precision.fp8_block_size} has no effect without --fp8-recipe blockwise"


@note("cost")
def param_gather_without_effect(draft: Draft) -> Notes:
    reason = why_no_codes_are_gathered(draft)
    if draft.config.precision.fp8_param_gather and reason:
        yield PlanNote(f"--fp8-param-gather has no effect {reason}", "cost", saves_memory=True)


def why_no_codes_are_gathered(draft: Draft | Plan) -> str:
    """Return why --fp8-param-gather has no effect, to follow these words; empty: it has."""
    parallel = draft.config.parallel
    replicas = draft.derived.data_parallel_size * parallel.context_parallel_size
    is_sharded = parallel.data_parallel_sharding_strategy != "no_shard"
    if draft.config.precision.fp8_format is None:
        return "without --fp8-format"
    if draft.derived.transformer_impl == TRANSFORMER_ENGINE:
        return "with --transformer-impl transformer_engine: weights are all-gathered in their dtype; --transformer-impl local gathers codes"
    if not is_sharded or replicas <= parallel.num_distributed_optimizer_instances:
        return "with one replica, or with --data-parallel-sharding-strategy no_shard: no weights are all-gathered"
    if not any(recipe.name in ("delayed", "tensorwise") for recipe in _recipes_outside_experts(draft)):
        return (
            "unless a linear layer, other than those of routed experts, has the recipe delayed or tensorwise"
        )
    return ""


def gathers_codes(draft: Draft | Plan) -> bool:
    """Return whether ranks all-gather weights as FP8 codes."""
    return draft.config.precision.fp8_param_gather and not why_no_codes_are_gathered(draft)


def _recipes_outside_experts(draft: Draft | Plan) -> Iterator[Recipe]:
    """Yield the recipe of each linear layer that has one and is not of a routed expert."""
    flags, modules = recipe_of_flags(draft), draft.derived.fp8_modules
    for one in linear_layers(draft.derived.model_spec):
        is_fp8 = one.layer in draft.derived.fp8_layers
        recipe = modules.by_path[one.path] if modules is not None else flags if is_fp8 else None
        if recipe is not None and ".mlp.experts." not in one.path:
            yield recipe


@rule
def gathered_codes_differ_from_own_weights(draft: Draft) -> Problems:
    interval = draft.config.training.check_weight_hash_across_dp_replicas_interval
    if gathers_codes(draft) and interval is not None:
        yield Problem(
            f"--check-weight-hash-across-dp-replicas-interval {interval} is not supported together with --fp8-param-gather: a"
            " rank has decoded codes of the weights that other ranks update, and its own as they are",
            "remove --check-weight-hash-across-dp-replicas-interval or --fp8-param-gather",
        )


@note("nothing")
def fp8_layers_of_transformer_engine(draft: Draft) -> Notes:
    """Name the implementation of each linear layer in FP8."""
    precision, numbers = draft.config.precision, draft.derived.fp8_layers
    if draft.derived.transformer_impl == "local" or not numbers:
        return
    reason = local_fp8_layers(draft)
    chosen = "" if draft.derived.fp8_modules is None else " and --te-precision-config-file"
    yield (
        f"--fp8-format {precision.fp8_format} --fp8-recipe {precision.fp8_recipe}{chosen}: Transformer Engine computes the linear"
        f" layers of layers {_ranges(numbers)} in FP8"
        + (f", but local those after norms ({reason})" if reason else "")
        + f"; weights are all-gathered in {precision.params_dtype}"
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges, such as 1-30, 32."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in pairs)


@note("result")
def delayed_scales_belong_to_an_iteration(draft: Draft) -> Notes:
    is_local = draft.derived.transformer_impl == "local"
    if is_local and any(recipe.name == "delayed" for recipe in fp8_recipes(draft)):
        yield "--fp8-recipe delayed: scales change with every iteration, where Megatron-LM's change with every micro-batch"


@note("result")
def gradients_of_blocks_are_e4m3(draft: Draft) -> Notes:
    if ("blockwise", "hybrid") in fp8_recipes(draft) and draft.derived.transformer_impl == "local":
        yield "--fp8-format hybrid with --fp8-recipe blockwise: gradients are in E4M3 too, the only format whose blocks GPUs multiply"


@unproven("nothing")
def fp8_recipes_without_rows(draft: Draft) -> Notes:
    names = {recipe.name for recipe in fp8_recipes(draft)}
    if recipe_of_flags(draft) is None or names <= set(FP8_RECIPES_WITH_ROWS):
        return
    precision, default = draft.config.precision, type(draft.config.precision)()
    flags = [
        f"--{name.replace('_', '-')} {value}"
        for name in ("fp8_format", "fp8_recipe", "fp4_format", "te_precision_config_file")
        if (value := getattr(precision, name)) != getattr(default, name)
    ]
    yield f"{' '.join(flags)} has no row in `megatrain parity`"


@unproven("result")
def fp8_codes_of_partial_sums(draft: Draft) -> Notes:
    """A cast of partial sums is not the sum of their casts."""
    recipe = recipe_of_flags(draft)
    if recipe is None:
        return
    flag = f"{'--fp4-format' if recipe.name == 'nvfp4' else '--fp8-format'} {recipe.format}"
    if draft.derived.kv_copies > 1:
        yield (
            f"{flag} with fewer query groups than --tensor-model-parallel-size casts gradients of keys and values that"
            " are partial sums"
        )
    is_split = draft.config.parallel.context_parallel_size > 1
    if is_split and draft.config.model.multi_latent_attention and "all_gather" in draft.derived.cp_comm_types:
        yield f"{flag} with --cp-comm-type all_gather casts gradients of expanded latents that are partial sums"


@unproven("result")
def fp8_blocks_across_ranks(draft: Draft) -> Notes:
    """Ranks that hold parts of blocks have scales of their own for them."""
    for recipe, block in scale_blocks(draft).items():
        for what, flags, size in dict.fromkeys(split_sizes(draft)):
            if size % block:
                yield (
                    f"{choice_of(draft, recipe)}: {size:g} {what} are not a multiple of {block}, so that blocks depend on the"
                    f" layout (decided by {flags})"
                )
                break


@unproven("result")
def fp8_of_transformer_engine(draft: Draft) -> Notes:
    precision = draft.config.precision
    if precision.fp8_format is None or draft.derived.transformer_impl != TRANSFORMER_ENGINE:
        return
    flags = f"--fp8-format {precision.fp8_format} --fp8-recipe {precision.fp8_recipe}"
    if all(recipe.name == "delayed" for recipe in fp8_recipes(draft)):
        yield f"{flags} with Transformer Engine has the same scales under every layout, and no row in `megatrain parity`"
    else:
        yield f"{flags} with Transformer Engine: scales of weights and of context ranks are those of a rank's part"
