"""Derived values of the machine: device, data types, ranks, sharding, timeouts."""

import math
from typing import Final

from megatrain.config.plan import DerivedValue, Draft, Plan
from megatrain.config.schema.experts import ExpertsConfig
from megatrain.config.schema.values import whole

_MIN_STARTUP_MINUTES: Final = 60
GPUS_PER_HOST: Final = 8
"""Assumed where it is not known."""
_MIN_SENT: Final = {True: 0.5, False: 0.9}
"""Smallest part of the tokens that an all-to-all sends to each rank, if all-gathering them all is to be faster: among GPUs of one host, and elsewhere."""
_MAX_ROWS: Final = 2
"""Largest number of rows of experts that an all-gather reserves, relative to an even load, for every possible assignment."""
_CAPACITY: Final = 1.25
"""Rows that it reserves on GPUs where these would be more."""


def device(draft: Draft) -> DerivedValue:
    name = draft.facts.device_name
    if draft.facts.device == "cuda" and name is None and draft.config.training.dry_run is not None:
        return DerivedValue("cuda", "assumed for a dry run")
    return DerivedValue(draft.facts.device, f"the device found{f', {name}' if name else ''}")


def params_dtype(draft: Draft) -> DerivedValue:
    if draft.config.precision.bf16:
        return DerivedValue("bfloat16", "--bf16")
    if draft.config.precision.fp16:
        return DerivedValue("float16", "--fp16")
    return DerivedValue("float32", "without --bf16 and --fp16")


def master_dtype(draft: Draft) -> DerivedValue:
    weights = draft.config.precision.params_dtype
    return DerivedValue("float64" if weights == "float64" else "float32", f"for {weights} weights")


def distributed_backend(draft: Draft) -> DerivedValue:
    device = draft.config.training.device
    return DerivedValue("nccl" if device == "cuda" else "gloo", f"for {device}")


def data_parallel_sharding_strategy(draft: Draft) -> DerivedValue:
    parallel = draft.config.parallel
    if parallel.use_megatron_fsdp:
        return DerivedValue("optim_grads_params", "ZeRO-3, as --use-megatron-fsdp asks for")
    if parallel.use_distributed_optimizer:
        return DerivedValue("optim", "--use-distributed-optimizer")
    return DerivedValue("no_shard", "--no-use-distributed-optimizer")


def world_size(draft: Draft) -> DerivedValue:
    return DerivedValue(draft.facts.world_size, "ranks that were launched")


def model_parallel_size(draft: Draft) -> DerivedValue:
    parallel = draft.config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    return DerivedValue(tp * pp, f"tp {tp} * pp {pp}")


def data_parallel_size(draft: Draft) -> DerivedValue:
    world, replica = draft.derived.world_size, draft.derived.model_parallel_size
    cp = draft.config.parallel.context_parallel_size
    if cp == 1:
        return DerivedValue(whole(world, replica), f"{world} ranks / (tp * pp = {replica})")
    return DerivedValue(whole(world, replica * cp), f"{world} ranks / (tp * cp * pp = {replica * cp})")


def experts_are_split(plan: Draft | Plan) -> bool:
    """Return whether experts are on several ranks, which communicate."""
    ranks = plan.config.parallel.expert_model_parallel_size * plan.derived.expert_tensor_parallel_size
    return plan.config.experts.num_experts is not None and ranks > 1


def expert_tensor_parallel_size(draft: Draft) -> DerivedValue:
    given = draft.config.parallel.expert_tensor_parallel_size
    if given is not None and draft.config.experts.num_experts is not None:
        return DerivedValue(given, "--expert-tensor-parallel-size")
    return DerivedValue(draft.config.parallel.tensor_model_parallel_size, "--tensor-model-parallel-size")


def flex_is_alltoall(draft: Draft) -> DerivedValue | None:
    """Override the dispatcher that needs DeepEP or HybridEP by the one that sends the same tokens."""
    if draft.config.experts.moe_token_dispatcher_type != "flex":  # noqa: S105 (no password)
        return None
    return DerivedValue(
        "alltoall",
        "--moe-token-dispatcher-type flex runs as alltoall, with the same result: DeepEP and HybridEP are not used",
    )


def moe_alltoall_as_allgather(draft: Draft) -> DerivedValue:
    ep = draft.config.parallel.expert_model_parallel_size
    known = draft.facts.ranks_per_node or 1
    per_node = known if known > 1 else GPUS_PER_HOST  # 1: perhaps of ranks that see one GPU each
    is_one_host = (
        draft.facts.world_size <= per_node or per_node % (ep * draft.derived.expert_tensor_parallel_size) == 0
    )
    return all_gather_of_tokens(
        draft.config.experts, ep, on_gpus_of_host=is_one_host and draft.config.training.device == "cuda"
    )


def moe_expert_rank_capacity_factor(draft: Draft) -> DerivedValue:
    experts, ep = draft.config.experts, draft.config.parallel.expert_model_parallel_size
    if experts.num_experts is None or ep == 1 or experts.sends_by_alltoall:
        return DerivedValue(None, "without an all-gather of tokens to the ranks of experts")
    if experts.moe_pad_expert_input_to_capacity:
        return DerivedValue(
            None, "--moe-pad-expert-input-to-capacity: all experts have the same number of rows"
        )
    rows = possible_rows(experts, ep)
    reason = f"memory for every possible assignment is {rows:.3g} times that of an even load"
    if draft.config.training.device != "cuda":
        return DerivedValue(None, reason)
    return DerivedValue(capacity_on_gpus(experts, ep), reason)


def capacity_on_gpus(experts: ExpertsConfig, ep: int) -> float | None:
    """Return the rows of a rank's experts after an all-gather, relative to an even load; None: those of every possible assignment."""
    return None if possible_rows(experts, ep) <= _MAX_ROWS else _CAPACITY


def possible_rows(experts: ExpertsConfig, ep: int) -> float:
    """Return the possible assignments to a rank's experts, relative to an even load."""
    number, top_k = experts.num_experts or 1, experts.moe_router_topk
    return ep * min(top_k, max(number // ep, 1)) / top_k


def all_gather_of_tokens(experts: ExpertsConfig, ep: int, *, on_gpus_of_host: bool) -> DerivedValue:
    """Decide whether all-gathers replace the all-to-all among `ep` expert ranks, which may be GPUs of one host."""
    number, top_k = experts.num_experts, experts.moe_router_topk
    if number is None or experts.moe_token_dispatcher_type == "allgather":  # noqa: S105 (no password)
        return DerivedValue(False, "--moe-token-dispatcher-type alltoall is not given")
    if ep == 1 or number % ep or top_k > number:
        return DerivedValue(False, f"--expert-model-parallel-size {ep}")
    sent = _chosen(number, ep, top_k)
    if experts.moe_router_num_groups is not None and experts.moe_router_group_topk is not None:
        sent = min(sent, _chosen(experts.moe_router_num_groups, ep, experts.moe_router_group_topk))
    expected = f"with an even load {100 * sent:.1f} % of the tokens go to each rank"
    if sent < _MIN_SENT[on_gpus_of_host]:
        return DerivedValue(False, expected)
    rows = possible_rows(experts, ep)
    if rows > _MAX_ROWS and not on_gpus_of_host:
        return DerivedValue(False, f"experts would need memory for {rows:.3g} times the rows of an even load")
    return DerivedValue(True, f"{expected}, and the host waits for no counts")


def _chosen(number: int, ranks: int, top_k: int) -> float:
    """Return the probability that a rank holds one of `top_k` random choices of `number` that the ranks share."""
    elsewhere = number - number // ranks
    return 1 - math.comb(elsewhere, top_k) / max(math.comb(number, top_k), 1)


def startup_timeout_seconds(draft: Draft) -> DerivedValue:
    minutes = draft.config.parallel.distributed_timeout_minutes
    if minutes > _MIN_STARTUP_MINUTES:
        return DerivedValue(60 * minutes, "--distributed-timeout-minutes")
    return DerivedValue(
        60 * _MIN_STARTUP_MINUTES, "at least an hour: ranks wait for each other's indices and caches"
    )


def collective_timeout_seconds(draft: Draft) -> DerivedValue:
    parallel = draft.config.parallel
    if parallel.distributed_timeout_seconds_after_init is not None:
        return DerivedValue(
            parallel.distributed_timeout_seconds_after_init,
            "--distributed-timeout-seconds-after-init",
        )
    return DerivedValue(60 * parallel.distributed_timeout_minutes, "--distributed-timeout-minutes")


def gloo_without_gpu(draft: Draft) -> DerivedValue | None:
    """Override --distributed-backend nccl on CPUs."""
    is_nccl_on_cpu = (
        draft.config.training.device == "cpu" and draft.config.parallel.distributed_backend == "nccl"
    )
    return (
        DerivedValue("gloo", "--distributed-backend nccl needs GPUs; on CPUs gloo is used")
        if is_nccl_on_cpu
        else None
    )


def nothing_is_sharded(draft: Draft) -> DerivedValue | None:
    """Override the default of --use-distributed-optimizer for no_shard."""
    path, parallel = "parallel.use_distributed_optimizer", draft.config.parallel
    is_open = parallel.use_distributed_optimizer and draft.is_default(path)
    if parallel.data_parallel_sharding_strategy != "no_shard" or not is_open:
        return None
    return DerivedValue(False, "--data-parallel-sharding-strategy no_shard: optimizer state is not sharded")
