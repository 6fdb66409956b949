"""Rules about data parallelism."""

import math
from collections.abc import Callable, Iterator
from typing import Final

from megatrain.config.derive.fp8 import gathers_codes
from megatrain.config.errors import Problem
from megatrain.config.fixes import divisors, use
from megatrain.config.plan import Draft

Problems = Iterator[Problem]

_INSTANCES: Final = "parallel.num_distributed_optimizer_instances"


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


def bf16_reduction_requires_bf16_weights(draft: Draft) -> Problems:
    precision = draft.config.precision
    if precision.grad_reduce_in_bf16 and precision.params_dtype != "bfloat16":
        yield Problem(
            f"--grad-reduce-in-bf16 requires bf16 weights, and they are {precision.params_dtype}: gradients would be less"
            " precise than the weights that they update",
            "add --bf16, or remove --grad-reduce-in-bf16",
        )


def overlapped_products_have_one_stream(draft: Draft) -> Problems:
    if draft.config.parallel.tp_comm_overlap and draft.config.experts.moe_shared_expert_overlap:
        yield Problem(
            "--tp-comm-overlap is not supported together with --moe-shared-expert-overlap: layers on two streams would"
            " use the same peer memory",
            "remove --tp-comm-overlap or --moe-shared-expert-overlap",
        )


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


def gathered_codes_differ_from_own_weights(draft: Draft) -> Problems:
    interval = draft.config.training.check_weight_hash_across_dp_replicas_interval
    if gathers_codes(draft) and interval is not None:
        yield Problem(
            f"--check-weight-hash-across-dp-replicas-interval {interval} is not supported together with --fp8-param-gather: a"
            " rank has decoded codes of the weights that other ranks update, and its own as they are",
            "remove --check-weight-hash-across-dp-replicas-interval or --fp8-param-gather",
        )


PARALLEL_RULES: Final[tuple[Callable[[Draft], Problems], ...]] = (
    sharding_settings_agree,
    instances_divide_replicas,
    instances_divide_replicas_of_experts,
    instances_shard_optimizer_state,
    bf16_reduction_requires_bf16_weights,
    overlapped_products_have_one_stream,
    overlapped_products_are_on_one_host,
    gathered_codes_differ_from_own_weights,
)
