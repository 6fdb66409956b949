"""Combinations that are right, but whose result is not the same under every layout, or not proven to be.

Each is a line of the plan. --require-parity turns these lines into errors.
"""

from collections.abc import Callable, Iterator
from typing import Final

from megatrain.config.derive.custom_layers import layer_function
from megatrain.config.derive.fp8 import choice_of, fp8_recipes, recipe_of_flags, scale_blocks, split_sizes
from megatrain.config.derive.training_length import sizes_of_batches
from megatrain.config.derive.transformer_engine import TRANSFORMER_ENGINE
from megatrain.config.errors import Problem
from megatrain.config.plan import Draft

_COMMAND: Final = "megatrain parity"
FP8_RECIPES_WITH_ROWS: Final = ("tensorwise", "delayed", "blockwise", "nvfp4")
"""Recipes whose scales are the same under every layout. Their rows are in fp64, in which a split equals one process."""


def fp8_recipes_without_rows(draft: Draft) -> Iterator[str]:
    names = {recipe.name for recipe in fp8_recipes(draft)}
    if recipe_of_flags(draft) is None or names <= set(FP8_RECIPES_WITH_ROWS):
        return
    precision, default = draft.config.precision, type(draft.config.precision)()
    flags = [
        f"--{name.replace('_', '-')} {value}"
        for name in ("fp8_format", "fp8_recipe", "fp4_format", "te_precision_config_file")
        if (value := getattr(precision, name)) != getattr(default, name)
    ]
    yield f"{' '.join(flags)} has no row in `{_COMMAND}`"


def layers_of_transformer_engine(draft: Draft) -> Iterator[str]:
    if draft.derived.transformer_impl == TRANSFORMER_ENGINE:
        yield (
            "the layers of Transformer Engine are compared on GPUs only"
            f" (`{_COMMAND} --device cuda --transformer-impl transformer_engine`)"
        )


def custom_layers(draft: Draft) -> Iterator[str]:
    function = layer_function(draft.config.model.spec)
    if function is not None:
        yield f"the layers of --spec {function} have no row in `{_COMMAND}`"


def custom_loss(draft: Draft) -> Iterator[str]:
    if draft.config.training.loss is not None:
        yield f"--loss {draft.config.training.loss} has no row in `{_COMMAND}`"


def loss_of_global_loads(draft: Draft) -> Iterator[str]:
    experts = draft.config.experts
    if experts.num_experts is not None and "global_aux_loss" in experts.moe_router_load_balancing_type:
        yield (
            "--moe-router-load-balancing-type global_aux_loss depends on the number of replicas, as in Megatron-LM: it"
            " uses the loads of the micro-batches so far"
        )


def order_of_cyclic_samples(draft: Draft) -> Iterator[str]:
    if draft.config.data.dataloader_type == "cyclic":
        yield (
            "--dataloader-type cyclic orders samples by the number of replicas, as in Megatron-LM: each of them shuffles its"
            " part, or with --no-data-sharding takes every so many samples of a micro-batch"
        )


def decreased_batches(draft: Draft) -> Iterator[str]:
    training, dp = draft.config.training, draft.derived.data_parallel_size
    if not training.decrease_batch_size_if_needed:
        return
    sizes = sizes_of_batches(draft)
    wanted = (*sizes.rule.sizes, training.eval_global_batch_size)
    if any(size % sizes.pass_size for size in wanted):
        yield (
            "--decrease-batch-size-if-needed rounds the batch down to a multiple of"
            f" {training.micro_batch_size} * dp {dp} samples"
        )


def stream_of_the_shared_expert(draft: Draft) -> Iterator[str]:
    experts = draft.config.experts
    has_shared = any(
        layer.experts is not None and layer.experts.shared_ffn_hidden_size
        for layer in draft.derived.model_spec.layers
    )
    if experts.moe_shared_expert_overlap and has_shared and draft.config.training.device == "cuda":
        yield "--moe-shared-expert-overlap is the same computation on another stream, compared on GPUs only (tests/gpu)"


def graphs_of_passes(draft: Draft) -> Iterator[str]:
    if draft.derived.cuda_graphs:
        yield "--cuda-graph-impl launches the same kernels, weight gradients partly in another order: compared on GPUs only (tests/gpu)"


def means_of_context_ranks(draft: Draft) -> Iterator[str]:
    parallel = draft.config.parallel
    if parallel.context_parallel_chunk_means and parallel.context_parallel_size > 1:
        yield "--context-parallel-chunk-means makes the loss depend on --context-parallel-size"


def fp8_codes_of_partial_sums(draft: Draft) -> Iterator[str]:
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


def fp8_blocks_across_ranks(draft: Draft) -> Iterator[str]:
    """Ranks that hold parts of blocks have scales of their own for them."""
    for recipe, block in scale_blocks(draft).items():
        for what, flags, size in dict.fromkeys(split_sizes(draft)):
            if size % block:
                yield (
                    f"{choice_of(draft, recipe)}: {size:g} {what} are not a multiple of {block}, so that blocks depend on the"
                    f" layout (decided by {flags})"
                )
                break


def fp8_of_transformer_engine(draft: Draft) -> Iterator[str]:
    precision = draft.config.precision
    if precision.fp8_format is None or draft.derived.transformer_impl != TRANSFORMER_ENGINE:
        return
    flags = f"--fp8-format {precision.fp8_format} --fp8-recipe {precision.fp8_recipe}"
    if all(recipe.name == "delayed" for recipe in fp8_recipes(draft)):
        yield f"{flags} with Transformer Engine has the same scales under every layout, and no row in `{_COMMAND}`"
    else:
        yield f"{flags} with Transformer Engine: scales of weights and of context ranks are those of a rank's part"


UNPROVEN: Final[tuple[Callable[[Draft], Iterator[str]], ...]] = (
    fp8_recipes_without_rows,
    layers_of_transformer_engine,
    custom_layers,
    custom_loss,
    loss_of_global_loads,
    order_of_cyclic_samples,
    decreased_batches,
    stream_of_the_shared_expert,
    graphs_of_passes,
    means_of_context_ranks,
    fp8_codes_of_partial_sums,
    fp8_blocks_across_ranks,
    fp8_of_transformer_engine,
)


def unproven(draft: Draft) -> Iterator[str]:
    """Yield one line of the plan per combination."""
    if draft.config.training.require_parity:
        return  # problems, see below
    for rule in UNPROVEN:
        yield from (f"not proven equal under every layout: {line}" for line in rule(draft))


def parity_is_required(draft: Draft) -> Iterator[Problem]:
    """Rule: with --require-parity every combination is proven."""
    if not draft.config.training.require_parity:
        return
    for rule in UNPROVEN:
        for line in rule(draft):
            yield Problem(
                f"--require-parity: {line}",
                "change this setting, or remove --require-parity to run with a note",
            )
