"""FP8: the layers that it covers, and the sizes of their products."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from megatrain.config.derive.transformer_engine import TRANSFORMER_ENGINE
from megatrain.config.model_spec.layer import LayerSpec
from megatrain.config.module_precision import Recipe, digest_of, linear_layers, recipes_of_modules
from megatrain.config.plan import DerivedValue, Draft, Plan

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


def gathers_codes(draft: Draft | Plan) -> bool:
    """Return whether ranks all-gather weights as FP8 codes."""
    return draft.config.precision.fp8_param_gather and not why_no_codes_are_gathered(draft)


def why_no_codes_are_gathered(draft: Draft | Plan) -> str:
    """Return why --fp8-param-gather has no effect, to follow these words; empty: it has."""
    parallel = draft.config.parallel
    replicas = draft.derived.data_parallel_size * parallel.context_parallel_size
    is_sharded = parallel.data_parallel_sharding_strategy != "no_shard"
    if draft.config.precision.fp8_format is None:
        return "without --fp8-format"
    if draft.derived.transformer_impl == TRANSFORMER_ENGINE:
        return "with --transformer-impl transformer_engine: weights are all-gathered in their dtype"
    if not is_sharded or replicas <= parallel.num_distributed_optimizer_instances:
        return "with one replica, or with --data-parallel-sharding-strategy no_shard: no weights are all-gathered"
    if not any(recipe.name in ("delayed", "tensorwise") for recipe in _recipes_outside_experts(draft)):
        return (
            "unless a linear layer, other than those of routed experts, has the recipe delayed or tensorwise"
        )
    return ""


def _recipes_outside_experts(draft: Draft | Plan) -> Iterator[Recipe]:
    """Yield the recipe of each linear layer that has one and is not of a routed expert."""
    flags, modules = recipe_of_flags(draft), draft.derived.fp8_modules
    for one in linear_layers(draft.derived.model_spec):
        is_fp8 = one.layer in draft.derived.fp8_layers
        recipe = modules.by_path[one.path] if modules is not None else flags if is_fp8 else None
        if recipe is not None and ".mlp.experts." not in one.path:
            yield recipe


def choice_of(draft: Draft, recipe: str) -> str:
    """Return the flag that chooses a recipe in use: of all linear layers, or of single ones."""
    precision, flags = draft.config.precision, recipe_of_flags(draft)
    if flags is None or flags.name != recipe:
        return f"--te-precision-config-file {precision.te_precision_config_file}: fp8_quantization_recipe {recipe}"
    return f"--fp8-recipe {recipe}" if precision.fp4_format is None else f"--fp4-format {flags.format}"


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


def te_precision_config_digest(draft: Draft) -> DerivedValue:
    path, text = draft.config.precision.te_precision_config_file, draft.facts.module_precision
    if path is None or text is None:
        return DerivedValue(None, _NO_FILE)
    return DerivedValue(digest_of(text), f"of {path}")


def fp8_modules(draft: Draft) -> DerivedValue:
    """Derive the recipe of each linear layer from the file of --te-precision-config-file."""
    path, text = draft.config.precision.te_precision_config_file, draft.facts.module_precision
    if path is None or text is None:
        return DerivedValue(None, _NO_FILE)
    found = recipes_of_modules(
        text,
        draft.derived.model_spec,
        fp8_layers=_layers_of_flags(draft),
        recipe=recipe_of_flags(draft),
    )
    parts = [f"matcher {name} decides {count}" for name, count in found.deciding.items()]
    others = len(found.linears) - sum(found.deciding.values())
    return DerivedValue(found, f"by {path}: {', '.join((*parts, f'the flags {others}'))}")


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
    return (*range(first, last), *range(count, count + (draft.config.model.mtp_num_layers or 0)))


def gemm_sizes(draft: Draft, *, gathers_values: bool = False) -> Iterator[GemmSize]:
    """Yield the sizes of all products in FP8 layers; with `gathers_values`, casts follow the gather of sequence parallelism."""
    parallel, model = draft.config.parallel, draft.config.model
    tp = parallel.tensor_model_parallel_size
    ranks = parallel.context_parallel_size * (tp if parallel.sequence_parallel and not gathers_values else 1)
    samples, length = draft.config.training.micro_batch_size, draft.config.data.seq_length
    yield GemmSize(
        "tokens of a micro-batch on a rank", "--seq-length, --micro-batch-size", samples * length / ranks
    )
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
