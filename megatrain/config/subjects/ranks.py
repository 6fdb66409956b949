"""Ranks: their number, the sizes of their groups, what is sharded over them, time limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

from megatrain.config.derive.vision import length_in_words, sample_length
from megatrain.config.errors import Problem
from megatrain.config.fixes import (
    Change,
    best,
    distance,
    divisors,
    fewer_ranks,
    lengths,
    multiples,
    use,
    words,
)
from megatrain.config.plan import DerivedValue, Draft, Plan
from megatrain.config.registry import Notes, Problems, derives, note, overrides, rule
from megatrain.config.schema.tree import flag_of
from megatrain.config.schema.values import whole

_MIN_STARTUP_MINUTES: Final = 60
_INSTANCES: Final = "parallel.num_distributed_optimizer_instances"
_MOST_OVERLAPPED_RANKS: Final = 4
_LINKED_ARCHITECTURES: Final = (9, 10)
"""Major compute capabilities of GPUs of data centres."""
_SMALL_MESSAGE: Final = 2**21
"""Numbers below which a message takes less time than its copies and flags take the host to launch."""
TP: Final = "parallel.tensor_model_parallel_size"
CP: Final = "parallel.context_parallel_size"


@derives("derived.world_size")
def world_size(draft: Draft) -> DerivedValue:
    return DerivedValue(draft.facts.world_size, "ranks that were launched")


@rule
def world_size_is_for_dry_runs(draft: Draft) -> Problems:
    size = draft.config.parallel.world_size
    if size is not None and draft.config.training.dry_run is None:
        yield Problem(
            f"--world-size {size} requires --dry-run, since a run has the ranks that the launcher starts",
            "add --dry-run, or remove --world-size and start the ranks (torchrun --nproc-per-node, --nnodes)",
        )


@derives("derived.data_parallel_size")
def data_parallel_size(draft: Draft) -> DerivedValue:
    world, parallel = draft.derived.world_size, draft.config.parallel
    replica = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    cp = parallel.context_parallel_size
    ranks = f"{world} rank{'' if world == 1 else 's'}"
    if cp == 1:
        return DerivedValue(whole(world, replica), f"{ranks} / (tp * pp = {replica})")
    return DerivedValue(whole(world, replica * cp), f"{ranks} / (tp * cp * pp = {replica * cp})")


@rule
def ranks_hold_whole_replicas(draft: Draft) -> Problems:
    parallel = draft.config.parallel
    sizes = {path: draft.config.get(path) for path in (TP, CP, "parallel.pipeline_model_parallel_size")}
    if parallel.context_parallel_size == 1:
        del sizes[CP]
    yield from _ranks_are_a_multiple_of(sizes, draft)


@rule
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
        started = "1 rank was" if world == 1 else f"{world} ranks were"
        named = [words({path: size}) for path, size in sizes.items()]
        yield Problem(
            f"{f'--world-size {world}' if is_given else f'{started} started, which'} is not a multiple of"
            f" {' * '.join(named)} = {product}",
            f"{use(draft, _smaller_sizes(draft, sizes, world))}, or {ranks}",
        )


def _smaller_sizes(draft: Draft, sizes: Mapping[str, int], world: int) -> Iterator[Change]:
    """Yield sizes that fit the number of ranks: in place of one of these (that of the command line first), else of several.

    Divisors of a given size come first: they keep what was divisible by it, layers or experts.
    """
    inner_first = list(sizes.items())[::-1]
    for path, size in sorted(inner_first, key=lambda item: distance(draft, item[0])):
        others = math.prod(sizes.values()) // size
        fits = [part for part in range(size - 1, 0, -1) if world % (others * part) == 0]
        order = fits if path in (TP, CP) else sorted(fits, key=lambda part: size % part > 0)
        yield from ({path: part} for part in order)
    ranks: dict[str, int] = {}
    for path, size in sizes.items():
        ranks[path] = math.gcd(size, world // math.prod(ranks.values()))
    yield ranks


@rule
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


@rule
def sequence_divides_over_tp_ranks(draft: Draft) -> Problems:
    parallel, length = draft.config.parallel, sample_length(draft.config)
    tp = parallel.tensor_model_parallel_size
    if parallel.sequence_parallel and parallel.context_parallel_size == 1 and length % tp:
        yield Problem(
            f"--sequence-parallel requires {length_in_words(draft.config)} to be divisible by --tensor-model-parallel-size {tp}",
            f"{use(draft, lengths(draft, tp), fewer_ranks(draft, TP))}, or remove --sequence-parallel",
        )


@derives("parallel.sequence_parallel")
def sequence_parallel(draft: Draft) -> DerivedValue:
    """Split the sequence where products then overlap the communication of tensor ranks; elsewhere a flag does, as in Megatron-LM."""
    reason = next(_why_sequences_are_whole(draft), None)
    return DerivedValue(
        reason is None, reason or "the same result, with less memory and communication out of sight"
    )


def _why_sequences_are_whole(draft: Draft) -> Iterator[str]:
    config, parallel = draft.config, draft.config.parallel
    if not draft.is_given("parallel.tp_comm_overlap"):
        yield from _why_products_wait(draft)
    else:
        yield from _why_products_cannot_overlap(draft)
        if not parallel.tp_comm_overlap:
            yield "--no-tp-comm-overlap"
    if config.data.pack_documents or config.data.seq_length_schedule is not None:
        yield "samples have several lengths"
    cp = parallel.context_parallel_size
    chunks = parallel.tensor_model_parallel_size * cp * (2 if cp > 1 else 1)
    if sample_length(config) % chunks:
        yield f"{length_in_words(config)} is no multiple of {chunks}"
    if config.model.spec:
        yield "parts of --spec may mix the rows of a sample"


@derives("parallel.tp_comm_overlap")
def tp_comm_overlap(draft: Draft) -> DerivedValue:
    """Overlap the communication of tensor ranks where that was measured to be faster, and equal to collectives."""
    reason = next(_why_products_wait(draft), None)
    if not draft.config.parallel.sequence_parallel:
        reason = reason or "--no-sequence-parallel"
    return DerivedValue(reason is None, reason or "copy engines send over NVLink while products are computed")


def _why_products_cannot_overlap(draft: Draft) -> Iterator[str]:
    config, facts = draft.config, draft.facts
    size = config.parallel.tensor_model_parallel_size
    if size == 1:
        yield "--tensor-model-parallel-size 1"
    if config.training.device != "cuda":
        yield "on a CPU: communication and products take turns"
    if (facts.ranks_per_node or facts.devices_per_node or size) % size:
        yield "tensor ranks are on several hosts"


def _why_products_wait(draft: Draft) -> Iterator[str]:
    yield from _why_products_cannot_overlap(draft)
    config, facts, parallel = draft.config, draft.facts, draft.config.parallel
    if draft.is_given("training.mlp_chunks_for_training") and config.training.mlp_chunks_for_training > 1:
        yield "--mlp-chunks-for-training: products are of whole layers"
    capability = facts.device_capability or (_LINKED_ARCHITECTURES[0], 0)
    if any(word in (facts.device_name or "") for word in ("PCIe", "NVL")):
        capability = (0, 0)
    samples = config.training.micro_batch_size / parallel.context_parallel_size
    yield from why_products_wait(draft, parallel.tensor_model_parallel_size, samples, capability)


def why_products_wait(
    plan: Draft | Plan, tp: int, samples: float, capability: tuple[int, int]
) -> Iterator[str]:
    """Yield why layers of `tp` ranks of one host would not overlap products and communication by default.

    Args:
        samples: of a micro-batch on a context-parallel rank.
        capability: compute capability of the GPUs.
    """
    config = plan.config
    if config.precision.fp8_format is not None or config.precision.fp4_format is not None:
        yield "linear layers of FP8 and FP4 wait for their communication"
    if config.model.model_family != "gpt":
        yield "measured with layers of GPTs only"
    if config.adapters.lora_rank is not None:
        yield "--lora-rank: products are of whole layers"
    if config.experts.moe_shared_expert_overlap:
        yield "layers on two streams would use the same peer memory"
    if tp > _MOST_OVERLAPPED_RANKS:
        yield f"measured with 2 to {_MOST_OVERLAPPED_RANKS} tensor ranks only"
    if capability[0] not in _LINKED_ARCHITECTURES:
        yield "measured on GPUs that NVLink connects all to all"
    rows = int(config.data.seq_length * samples / tp)
    if rows * config.model.hidden_size < _SMALL_MESSAGE:
        yield f"messages of {rows} rows are too small"


@rule
def overlapped_products_are_on_one_host(draft: Draft) -> Problems:
    parallel, per_node = draft.config.parallel, draft.facts.ranks_per_node
    size = parallel.tensor_model_parallel_size
    if (
        parallel.tp_comm_overlap
        and draft.config.training.device == "cuda"
        and per_node is not None
        and draft.facts.world_size > per_node > 1  # 1: perhaps of ranks that see one GPU each
        and per_node % size
    ):
        yield Problem(
            f"--tp-comm-overlap with --tensor-model-parallel-size {size} and {per_node} ranks per host: tensor ranks on several"
            " hosts cannot read each other's memory",
            f"remove --tp-comm-overlap, or use a --tensor-model-parallel-size that divides {per_node}",
        )


@derives("parallel.data_parallel_sharding_strategy")
def data_parallel_sharding_strategy(draft: Draft) -> DerivedValue:
    parallel = draft.config.parallel
    if parallel.use_megatron_fsdp:
        return DerivedValue("optim_grads_params", "ZeRO-3, as --use-megatron-fsdp asks for")
    if parallel.use_distributed_optimizer:
        return DerivedValue("optim", "--use-distributed-optimizer")
    return DerivedValue("no_shard", "--no-use-distributed-optimizer")


@overrides("parallel.use_distributed_optimizer")
def nothing_is_sharded(draft: Draft) -> DerivedValue | None:
    """Override the default of --use-distributed-optimizer for no_shard."""
    path, parallel = "parallel.use_distributed_optimizer", draft.config.parallel
    is_open = parallel.use_distributed_optimizer and draft.is_default(path)
    if parallel.data_parallel_sharding_strategy != "no_shard" or not is_open:
        return None
    return DerivedValue(False, "--data-parallel-sharding-strategy no_shard: optimizer state is not sharded")


@rule
def sharding_settings_agree(draft: Draft) -> Problems:
    parallel = draft.config.parallel
    strategy, is_on = parallel.data_parallel_sharding_strategy, parallel.use_distributed_optimizer
    flag = (
        f"--data-parallel-sharding-strategy {strategy}"
        if draft.is_given("parallel.data_parallel_sharding_strategy")
        else "--use-megatron-fsdp"
    )
    if strategy != "no_shard" and not is_on:
        yield Problem(
            f"{flag} shards optimizer state, which contradicts --no-use-distributed-optimizer",
            f"remove {flag} or --no-use-distributed-optimizer",
        )
    if strategy == "no_shard" and is_on:
        yield Problem(
            f"{flag} does not shard optimizer state, which contradicts --use-distributed-optimizer",
            f"remove {flag} or --use-distributed-optimizer",
        )


@note("nothing")
def strategy_without_fsdp(draft: Draft) -> Notes:
    path = "parallel.data_parallel_sharding_strategy"
    if draft.is_given(path) and not draft.config.parallel.use_megatron_fsdp:
        yield f"{flag_of(path)} {draft.config.get(path)} has an effect even without --use-megatron-fsdp, unlike in Megatron-LM"


@note("nothing")
def no_weights_are_gathered(draft: Draft) -> Notes:
    path = "parallel.overlap_param_gather"
    is_whole = draft.config.parallel.data_parallel_sharding_strategy == "no_shard"
    if draft.is_given(path) and draft.config.get(path) and is_whole:
        yield (
            "--overlap-param-gather has no effect without --use-distributed-optimizer, since every rank updates all of its"
            " weights"
        )


@rule
def instances_divide_replicas(draft: Draft) -> Problems:
    parallel, dp = draft.config.parallel, draft.derived.data_parallel_size
    instances, cp = parallel.num_distributed_optimizer_instances, parallel.context_parallel_size
    replicas = dp * cp
    if replicas % instances:
        ranks = "data-parallel ranks" if cp == 1 else f"replicas (data-parallel {dp} * context-parallel {cp})"
        yield Problem(
            f"--num-distributed-optimizer-instances {instances} does not divide the {replicas} {ranks}",
            use(draft, divisors(_INSTANCES, replicas, instances)),
        )


@rule
def instances_divide_replicas_of_experts(draft: Draft) -> Problems:
    parallel = draft.config.parallel
    if draft.config.experts.num_experts is None:
        return
    ep, etp = parallel.expert_model_parallel_size, draft.derived.expert_tensor_parallel_size
    per_replica = ep * etp * parallel.pipeline_model_parallel_size
    replicas, rest = divmod(draft.derived.world_size, per_replica)
    instances = parallel.num_distributed_optimizer_instances
    if not rest and replicas % instances:
        yield Problem(
            f"--num-distributed-optimizer-instances {instances} does not divide the {replicas} replicas of experts"
            f" ({draft.derived.world_size} ranks / (expert-model-parallel {ep} * expert-tensor-parallel {etp} *"
            f" pipeline-model-parallel {parallel.pipeline_model_parallel_size}))",
            use(draft, divisors(_INSTANCES, math.gcd(replicas, instances), instances)),
        )


@rule
def instances_shard_optimizer_state(draft: Draft) -> Problems:
    parallel = draft.config.parallel
    instances, replicas = parallel.num_distributed_optimizer_instances, draft.derived.data_parallel_size
    is_sharded = parallel.data_parallel_sharding_strategy != "no_shard"
    if instances > 1 and not is_sharded and replicas * parallel.context_parallel_size > 1:
        yield Problem(
            f"--num-distributed-optimizer-instances {instances} is not supported together with"
            " --no-use-distributed-optimizer: an instance has no sharded state",
            "remove --num-distributed-optimizer-instances, or what turns sharding off (--no-use-distributed-optimizer,"
            " --data-parallel-sharding-strategy no_shard)",
        )


@derives("parallel.distributed_backend")
def distributed_backend(draft: Draft) -> DerivedValue:
    device = draft.config.training.device
    return DerivedValue("nccl" if device == "cuda" else "gloo", f"for {device}")


@overrides("parallel.distributed_backend")
def gloo_without_gpu(draft: Draft) -> DerivedValue | None:
    """Override --distributed-backend nccl on CPUs."""
    if draft.config.training.device != "cpu" or draft.config.parallel.distributed_backend != "nccl":
        return None
    return DerivedValue("gloo", "--distributed-backend nccl needs GPUs; on CPUs gloo is used")


@derives("derived.startup_timeout_seconds")
def startup_timeout_seconds(draft: Draft) -> DerivedValue:
    minutes = draft.config.parallel.distributed_timeout_minutes
    if minutes > _MIN_STARTUP_MINUTES:
        return DerivedValue(60 * minutes, "--distributed-timeout-minutes")
    return DerivedValue(
        60 * _MIN_STARTUP_MINUTES, "at least an hour: ranks wait for each other's indices and caches"
    )


@derives("derived.collective_timeout_seconds")
def collective_timeout_seconds(draft: Draft) -> DerivedValue:
    parallel = draft.config.parallel
    if parallel.distributed_timeout_seconds_after_init is not None:
        return DerivedValue(
            parallel.distributed_timeout_seconds_after_init, "--distributed-timeout-seconds-after-init"
        )
    return DerivedValue(60 * parallel.distributed_timeout_minutes, "--distributed-timeout-minutes")
