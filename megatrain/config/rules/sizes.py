"""Rules about sizes: divisibility by ranks, stages, heads and batches."""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Final

from megatrain.config.derive.pipeline import pipeline_is_valid
from megatrain.config.errors import Problem
from megatrain.config.fixes import Change, best, divisors, fewer_ranks, multiples, use, words
from megatrain.config.plan import Draft

Problems = Iterator[Problem]

TP: Final = "parallel.tensor_model_parallel_size"


def heads_divide_over_query_groups(draft: Draft) -> Problems:
    model = draft.config.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    if model.group_query_attention and heads % groups:
        yield Problem(
            f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}",
            use(
                draft,
                divisors("model.num_query_groups", heads, groups),
                multiples("model.num_attention_heads", heads, groups),
            ),
        )


def query_groups_are_given(draft: Draft) -> Problems:
    """Check what the user gave, since a group count that cannot be derived is unresolved here."""
    if draft.config.model.group_query_attention and not draft.is_given_or_stored("model.num_query_groups"):
        yield Problem(
            "--group-query-attention requires --num-query-groups, which is missing",
            "add --num-query-groups 1, Megatron-LM's default, or the number of key and value heads of the model",
        )


def query_groups_have_an_effect(draft: Draft) -> Problems:
    model = draft.config.model
    if not model.group_query_attention and model.num_query_groups != model.num_attention_heads:
        yield Problem(
            f"--num-query-groups {model.num_query_groups} has no effect without --group-query-attention"
            " (Megatron-LM ignores it silently)",
            "remove --num-query-groups"
            + ("" if model.multi_latent_attention else ", or add --group-query-attention"),
        )


def hidden_size_divides_over_heads(draft: Draft) -> Problems:
    model = draft.config.model
    is_divided = not (draft.is_given_or_stored("model.kv_channels") or model.multi_latent_attention)
    if is_divided and model.hidden_size % model.num_attention_heads:
        yield Problem(
            f"--hidden-size {model.hidden_size} is not divisible by --num-attention-heads {model.num_attention_heads}",
            # RoPE needs an even number of channels per head.
            use(draft, multiples("model.hidden_size", model.hidden_size, 2 * model.num_attention_heads))
            + ", or give the channels per head with --kv-channels",
        )


def hidden_size_divides_over_tp_ranks(draft: Draft) -> Problems:
    size, tp = draft.config.model.hidden_size, draft.config.parallel.tensor_model_parallel_size
    if size % tp:
        yield Problem(
            f"--hidden-size {size} is not divisible by --tensor-model-parallel-size {tp}",
            use(draft, fewer_ranks(draft, TP), multiples("model.hidden_size", size, tp)),
        )


def ffn_size_is_positive(draft: Draft) -> Problems:
    model = draft.config.model
    if model.ffn_hidden_size == 0:
        yield Problem(
            f"--hidden-size {model.hidden_size} gives a gated MLP of width 0, rounded down to a multiple of 64",
            f"give a width, such as --ffn-hidden-size {4 * model.hidden_size}",
        )


def ranks_hold_whole_replicas(draft: Draft) -> Problems:
    parallel = draft.config.parallel
    names = ["tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"]
    sizes = {f"parallel.{name}": getattr(parallel, name) for name in names}
    if parallel.context_parallel_size == 1:
        del sizes["parallel.context_parallel_size"]
    yield from _ranks_are_a_multiple_of(sizes, draft)


def ranks_hold_all_experts(draft: Draft) -> Problems:
    parallel = draft.config.parallel
    if parallel.expert_model_parallel_size == 1 and parallel.expert_tensor_parallel_size is None:
        return
    sizes = {
        "parallel.expert_tensor_parallel_size": draft.derived.expert_tensor_parallel_size,
        "parallel.expert_model_parallel_size": parallel.expert_model_parallel_size,
        "parallel.pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
    }
    yield from _ranks_are_a_multiple_of(sizes, draft)


def _ranks_are_a_multiple_of(sizes: Mapping[str, int], draft: Draft) -> Problems:
    world, product = draft.derived.world_size, math.prod(sizes.values())
    if world % product:
        is_given = draft.config.raw("parallel.world_size") is not None
        more = best(draft, multiples("parallel.world_size", world, product))["parallel.world_size"]
        ranks = (
            f"--world-size {more}"
            if is_given
            else f"start {more} ranks (torchrun --nproc-per-node, --nnodes)"
        )
        named = [words({path: size}) for path, size in sizes.items()]
        yield Problem(
            f"{f'--world-size {world}' if is_given else f'{world} ranks were started, which'} is not a multiple of"
            f" {' * '.join(named)} = {product}",
            f"{use(draft, _smaller_sizes(sizes, world))}, or {ranks}",
        )


def _smaller_sizes(sizes: Mapping[str, int], world: int) -> Iterator[Change]:
    """Yield sizes that fit the number of ranks: in place of one of these, else of several.

    Divisors of a given size come first: they keep what was divisible by it, layers or experts.
    """
    for path, size in reversed(list(sizes.items())):
        others = math.prod(sizes.values()) // size
        fits = [part for part in range(size - 1, 0, -1) if world % (others * part) == 0]
        order = fits if path == TP else sorted(fits, key=lambda part: size % part > 0)
        yield from ({path: part} for part in order)
    ranks: dict[str, int] = {}
    for path, size in sizes.items():
        ranks[path] = math.gcd(size, world // math.prod(ranks.values()))
    yield ranks


def expert_ranks_match_dense_ranks(draft: Draft) -> Problems:
    """With stages numbered before replicas, the distance to the next stage is the number of ranks that share a micro-batch."""
    parallel = draft.config.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    ep, etp = parallel.expert_model_parallel_size, draft.derived.expert_tensor_parallel_size
    is_pp_first = parallel.use_tp_pp_dp_mapping and parallel.pipeline_model_parallel_size > 1
    if is_pp_first and draft.config.experts.num_experts is not None and tp * cp != etp * ep:
        yield Problem(
            f"--use-tp-pp-dp-mapping with pipeline stages requires --expert-tensor-parallel-size {etp} *"
            f" --expert-model-parallel-size {ep} = {etp * ep} to equal --tensor-model-parallel-size {tp} *"
            f" --context-parallel-size {cp} = {tp * cp}",
            "remove --use-tp-pp-dp-mapping, or make the products equal"
            f" (--expert-tensor-parallel-size 1 --expert-model-parallel-size {tp * cp})",
        )


def global_batch_divides_into_passes(draft: Draft) -> Problems:
    training, dp = draft.config.training, draft.derived.data_parallel_size
    batch, per_pass = training.global_batch_size, training.micro_batch_size * dp
    if training.step_batch_size_schedule is not None:
        return  # The rule `batch_sizes_are_valid` checks all of its batch sizes.
    if training.decrease_batch_size_if_needed and batch < per_pass:
        yield Problem(
            f"--global-batch-size {batch} is less than --micro-batch-size {training.micro_batch_size} *"
            f" data-parallel size {dp} = {per_pass}: --decrease-batch-size-if-needed would decrease it to 0",
            use(
                draft,
                multiples("training.global_batch_size", per_pass, per_pass),
                _smaller_micro_batches(draft, batch),
            ),
        )
    if batch % per_pass and not training.decrease_batch_size_if_needed:
        yield Problem(
            f"--global-batch-size {batch} is not a multiple of --micro-batch-size {training.micro_batch_size} *"
            f" data-parallel size {dp} = {per_pass}",
            use(
                draft,
                _smaller_micro_batches(draft, batch),
                multiples("training.global_batch_size", batch, per_pass),
            ),
        )


def _smaller_micro_batches(draft: Draft, batch: int) -> Iterator[Change]:
    """Yield micro-batches with which replicas share a batch evenly: what is trained stays the same."""
    per_replica, rest = divmod(batch, draft.derived.data_parallel_size)
    limit = draft.config.training.micro_batch_size - 1
    return iter(()) if rest else divisors("training.micro_batch_size", per_replica, limit)


def evaluation_batch_divides_into_passes(draft: Draft) -> Problems:
    training, dp = draft.config.training, draft.derived.data_parallel_size
    batch, per_pass = training.eval_global_batch_size, training.micro_batch_size * dp
    is_rounded = training.decrease_batch_size_if_needed and batch >= per_pass
    if batch % per_pass and batch != training.global_batch_size and not is_rounded:
        yield Problem(
            f"--eval-global-batch-size {batch} is not a multiple of --micro-batch-size {training.micro_batch_size} *"
            f" data-parallel size {dp} = {per_pass}",
            use(draft, multiples("training.eval_global_batch_size", batch, per_pass)),
        )


def sequence_divides_over_tp_ranks(draft: Draft) -> Problems:
    parallel, length = draft.config.parallel, draft.config.data.seq_length
    tp = parallel.tensor_model_parallel_size
    if parallel.sequence_parallel and parallel.context_parallel_size == 1 and length % tp:
        yield Problem(
            f"--sequence-parallel requires --seq-length {length} to be divisible by --tensor-model-parallel-size {tp}",
            f"{use(draft, lengths(draft, tp))}, or remove --sequence-parallel",
        )


def sequence_fits_the_model(draft: Draft) -> Problems:
    length, longest = draft.config.data.seq_length, draft.config.model.max_position_embeddings
    if longest is not None and length > longest:
        yield Problem(
            f"--seq-length {length} is longer than --max-position-embeddings {longest}",
            f"use --max-position-embeddings {length}, or --seq-length {longest}",
        )


def padded_vocabulary_divides_over_tp_ranks(draft: Draft) -> Problems:
    rows, tp = draft.config.model.padded_vocab_size, draft.config.parallel.tensor_model_parallel_size
    if rows % tp:
        yield Problem(
            f"--padded-vocab-size {rows} is not divisible by --tensor-model-parallel-size {tp}",
            f"{use(draft, multiples('model.padded_vocab_size', rows, tp))}, or remove it (or set it to auto)",
        )


def lengths(draft: Draft, factor: int) -> Iterator[Change]:
    """Yield multiples of `factor` near --seq-length; above --max-position-embeddings only if there is none below."""
    path, length = "data.seq_length", draft.config.data.seq_length
    yield from islice(multiples(path, length, factor), 4)
    longest = draft.config.model.max_position_embeddings
    if longest is not None and longest >= factor:
        yield {path: longest // factor * factor}


SIZE_RULES: Final[tuple[Callable[[Draft], Problems], ...]] = (
    heads_divide_over_query_groups,
    query_groups_are_given,
    query_groups_have_an_effect,
    hidden_size_divides_over_heads,
    hidden_size_divides_over_tp_ranks,
    ffn_size_is_positive,
    pipeline_is_valid,
    ranks_hold_whole_replicas,
    ranks_hold_all_experts,
    expert_ranks_match_dense_ranks,
    global_batch_divides_into_passes,
    evaluation_batch_divides_into_passes,
    sequence_divides_over_tp_ranks,
    sequence_fits_the_model,
    padded_vocabulary_divides_over_tp_ranks,
)
