"""Sizes that must fit one another: what divides over ranks, stages, heads and batches. One small function a rule.

A rule yields problems, each with the flag, its value and a value that works. It may compute freely: where something
that it needs is wrong already, `resolve` skips it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from megatrain.config.errors import Problem
from megatrain.config.plan import Draft

Problems = Iterator[Problem]


def heads_divide_over_tp_ranks(draft: Draft) -> Problems:
    heads, tp = draft.config.model.num_attention_heads, draft.config.parallel.tensor_model_parallel_size
    if heads % tp:
        yield Problem(
            f"--num-attention-heads {heads} do not divide over --tensor-model-parallel-size {tp}",
            f"use --tensor-model-parallel-size {_divisor_near(heads, tp)}, or --num-attention-heads {_multiple_near(heads, tp)}",
        )


def query_groups_divide_over_tp_ranks(draft: Draft) -> Problems:
    model, tp = draft.config.model, draft.config.parallel.tensor_model_parallel_size
    groups = model.num_query_groups
    if not model.group_query_attention or groups % tp == 0 or tp % groups == 0:
        return
    if tp > groups:
        yield Problem(
            f"--num-query-groups {groups} are not held by equally many of --tensor-model-parallel-size {tp} ranks each",
            f"use --tensor-model-parallel-size {tp // groups * groups}, or --num-query-groups {_divisor_near(tp, groups)}",
        )
    else:
        yield Problem(
            f"--num-query-groups {groups} do not divide over --tensor-model-parallel-size {tp}",
            f"use --tensor-model-parallel-size {_divisor_near(groups, tp)}, or"
            f" --num-query-groups {_multiple_near(groups, tp)}",
        )


def heads_divide_over_query_groups(draft: Draft) -> Problems:
    model = draft.config.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    if model.group_query_attention and heads % groups:
        yield Problem(
            f"--num-attention-heads {heads} do not divide over --num-query-groups {groups}",
            f"use --num-query-groups {_divisor_near(heads, groups)}",
        )


def query_groups_are_given(draft: Draft) -> Problems:
    """Asks what the user typed: a group count that cannot be derived is INVALID by now."""
    if draft.config.model.group_query_attention and not draft.is_given("model.num_query_groups"):
        yield Problem(
            "--group-query-attention is on, and --num-query-groups is missing",
            "give --num-query-groups, the number of key and value heads; Megatron-LM's default is 1",
        )


def query_groups_have_an_effect(draft: Draft) -> Problems:
    model = draft.config.model
    if not model.group_query_attention and model.num_query_groups != model.num_attention_heads:
        yield Problem(
            f"--num-query-groups {model.num_query_groups} has no effect without --group-query-attention"
            " (Megatron-LM ignores it silently)",
            "add --group-query-attention, or leave --num-query-groups out",
        )


def hidden_size_divides_over_heads(draft: Draft) -> Problems:
    model = draft.config.model
    if not draft.is_given("model.kv_channels") and model.hidden_size % model.num_attention_heads:
        size = _multiple_near(model.hidden_size, model.num_attention_heads)
        yield Problem(
            f"--hidden-size {model.hidden_size} does not divide over --num-attention-heads {model.num_attention_heads}",
            f"use --hidden-size {size}, or give the channels of a head with --kv-channels",
        )


def hidden_size_divides_over_tp_ranks(draft: Draft) -> Problems:
    size, tp = draft.config.model.hidden_size, draft.config.parallel.tensor_model_parallel_size
    if size % tp:
        yield Problem(
            f"--hidden-size {size} does not divide over --tensor-model-parallel-size {tp}",
            f"use --hidden-size {_multiple_near(size, tp)}, or --tensor-model-parallel-size {_divisor_near(size, tp)}",
        )


def ffn_size_divides_over_tp_ranks(draft: Draft) -> Problems:
    size, tp = draft.config.model.ffn_hidden_size, draft.config.parallel.tensor_model_parallel_size
    if size % tp:
        yield Problem(
            f"--ffn-hidden-size {size} does not divide over --tensor-model-parallel-size {tp}",
            f"use --ffn-hidden-size {_multiple_near(size, tp)}",
        )


def ffn_size_is_positive(draft: Draft) -> Problems:
    model = draft.config.model
    if model.ffn_hidden_size == 0:
        yield Problem(
            f"--hidden-size {model.hidden_size} with a gate gives an MLP of width 0, down to a multiple of 64",
            f"give --ffn-hidden-size, such as --ffn-hidden-size {4 * model.hidden_size}",
        )


def layers_divide_over_stages(draft: Draft) -> Problems:
    layers, pp = draft.config.model.num_layers, draft.config.parallel.pipeline_model_parallel_size
    if layers % pp:
        yield Problem(
            f"--num-layers {layers} do not divide over --pipeline-model-parallel-size {pp}",
            f"use --pipeline-model-parallel-size {_divisor_near(layers, pp)}, or --num-layers {_multiple_near(layers, pp)}",
        )


def ranks_hold_whole_replicas(draft: Draft) -> Problems:
    parallel = draft.config.parallel
    cp = parallel.context_parallel_size
    sizes = {
        "--tensor-model-parallel-size": parallel.tensor_model_parallel_size,
        **({"--context-parallel-size": cp} if cp > 1 else {}),
        "--pipeline-model-parallel-size": parallel.pipeline_model_parallel_size,
    }
    yield from _ranks_are_a_multiple_of(sizes, draft)


def ranks_hold_all_experts(draft: Draft) -> Problems:
    parallel = draft.config.parallel
    if parallel.expert_model_parallel_size == 1 and parallel.expert_tensor_parallel_size is None:
        return
    sizes = {
        "--expert-tensor-parallel-size": draft.derived.expert_tensor_parallel_size,
        "--expert-model-parallel-size": parallel.expert_model_parallel_size,
        "--pipeline-model-parallel-size": parallel.pipeline_model_parallel_size,
    }
    yield from _ranks_are_a_multiple_of(sizes, draft)


def _ranks_are_a_multiple_of(sizes: Mapping[str, int], draft: Draft) -> Problems:
    world, product = draft.derived.world_size, math.prod(sizes.values())
    if world % product:
        fits = _multiple_near(world, product)
        is_asked = draft.config.parallel.world_size is not None
        yield Problem(
            f"{f'--world-size {world}' if is_asked else f'{world} ranks were started, which'} is no multiple of"
            f" {' * '.join(f'{flag} {size}' for flag, size in sizes.items())} = {product}",
            f"use --world-size {fits}, or lower these sizes"
            if is_asked
            else f"start {fits} ranks (torchrun --nproc-per-node, --nnodes), or lower these sizes",
        )


def expert_ranks_match_dense_ranks(draft: Draft) -> Problems:
    """Where stages are closer than replicas, a stage's next one is as many ranks away as work on one micro-batch."""
    parallel = draft.config.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    ep, etp = parallel.expert_model_parallel_size, draft.derived.expert_tensor_parallel_size
    is_apart = parallel.use_tp_pp_dp_mapping and parallel.pipeline_model_parallel_size > 1
    if is_apart and draft.config.experts.num_experts is not None and tp * cp != etp * ep:
        yield Problem(
            f"with --use-tp-pp-dp-mapping and stages, --expert-tensor-parallel-size {etp} *"
            f" --expert-model-parallel-size {ep} = {etp * ep} must be --tensor-model-parallel-size {tp} *"
            f" --context-parallel-size {cp} = {tp * cp}",
            "leave --use-tp-pp-dp-mapping out, or make them equal"
            f" (--expert-tensor-parallel-size 1 --expert-model-parallel-size {tp * cp})",
        )


def global_batch_divides_into_passes(draft: Draft) -> Problems:
    training, dp = draft.config.training, draft.derived.data_parallel_size
    batch, per_pass = training.global_batch_size, training.micro_batch_size * dp
    if training.step_batch_size_schedule is not None:
        return  # The rule `batch_sizes_are_valid` looks at all of its batches.
    if training.decrease_batch_size_if_needed and batch < per_pass:
        yield Problem(
            f"--global-batch-size {batch} is less than --micro-batch-size {training.micro_batch_size} *"
            f" data-parallel size {dp} = {per_pass}: --decrease-batch-size-if-needed leaves nothing of it",
            f"use --global-batch-size {per_pass}",
        )
    if batch % per_pass and not training.decrease_batch_size_if_needed:
        yield Problem(
            f"--global-batch-size {batch} is no multiple of --micro-batch-size {training.micro_batch_size} *"
            f" data-parallel size {dp} = {per_pass}",
            f"use --global-batch-size {_multiple_near(batch, per_pass)}",
        )


def evaluation_batch_divides_into_passes(draft: Draft) -> Problems:
    training, dp = draft.config.training, draft.derived.data_parallel_size
    batch, per_pass = training.eval_global_batch_size, training.micro_batch_size * dp
    is_rounded = training.decrease_batch_size_if_needed and batch >= per_pass
    if batch % per_pass and batch != training.global_batch_size and not is_rounded:
        yield Problem(
            f"--eval-global-batch-size {batch} is no multiple of --micro-batch-size {training.micro_batch_size} *"
            f" data-parallel size {dp} = {per_pass}",
            f"use --eval-global-batch-size {_multiple_near(batch, per_pass)}",
        )


def sequence_divides_over_tp_ranks(draft: Draft) -> Problems:
    parallel, length = draft.config.parallel, draft.config.data.seq_length
    tp = parallel.tensor_model_parallel_size
    if parallel.sequence_parallel and parallel.context_parallel_size == 1 and length % tp:
        yield Problem(
            f"--seq-length {length} does not divide over --tensor-model-parallel-size {tp}, as --sequence-parallel needs",
            f"use --seq-length {_multiple_near(length, tp)}, or leave --sequence-parallel out",
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
            f"--padded-vocab-size {rows} does not divide over --tensor-model-parallel-size {tp}",
            f"use --padded-vocab-size {_multiple_near(rows, tp)}, or leave it out (or auto)",
        )


def _divisor_near(number: int, limit: int) -> int:
    """The largest divisor up to `limit`, and up to what anyone would use."""
    largest = min(number, limit, 2**16)
    return next(candidate for candidate in range(largest, 0, -1) if number % candidate == 0)


def _multiple_near(number: int, factor: int) -> int:
    """The next multiple from `number` on."""
    return -(-number // factor) * factor


SIZE_RULES: Final[tuple[Callable[[Draft], Problems], ...]] = (
    heads_divide_over_tp_ranks,
    query_groups_divide_over_tp_ranks,
    heads_divide_over_query_groups,
    query_groups_are_given,
    query_groups_have_an_effect,
    hidden_size_divides_over_heads,
    hidden_size_divides_over_tp_ranks,
    ffn_size_divides_over_tp_ranks,
    ffn_size_is_positive,
    layers_divide_over_stages,
    ranks_hold_whole_replicas,
    ranks_hold_all_experts,
    expert_ranks_match_dense_ranks,
    global_batch_divides_into_passes,
    evaluation_batch_divides_into_passes,
    sequence_divides_over_tp_ranks,
    sequence_fits_the_model,
    padded_vocabulary_divides_over_tp_ranks,
)
