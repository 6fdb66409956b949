"""Compares planned memory with that of a GPU or of a host, and lists the settings that reduce it.

largest total, memory of this host's GPU (None: there is none)  ─> a line for the memory table, or a warning
total of the ranks of a host, memory that this host has         ─> the same, for what lies in host memory
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from megatrain.config import Plan

COMMON_GPUS: Final = ((40, "A100"), (80, "H100"), (141, "H200"), (192, "B200"), (288, "B300"))
"""Nominal memory in GB, ascending, and a GPU that has it."""
WITHOUT_FP8: Final = ("A100",)
"""GPUs among these that have no FP8 products."""


@dataclass(frozen=True, kw_only=True)
class HostUse:
    """Bytes of host memory of a run, on the host that needs most."""

    ranks_per_host: int
    reason: str
    """Source of `ranks_per_host`."""
    per_host: int
    """Sum over its ranks: on CPUs all that a step needs; offloaded state; copies of --async-save."""
    available: int
    """Bytes that this host can still allocate."""

    def __str__(self) -> str:
        words = "fits into" if self.per_host <= self.available else "exceeds"
        ranks = f"{self.ranks_per_host} rank{'s' * (self.ranks_per_host > 1)}"
        return (
            f"the {gigabytes(self.per_host)} GB of a host of {ranks} ({self.reason}) {words} the"
            f" {gigabytes(self.available)} GB that this host has available"
        )


def gigabytes(num_bytes: int) -> str:
    """Return a size in GB."""
    return f"{num_bytes / 1e9:.2f}" if num_bytes >= 1e8 or not num_bytes else f"{num_bytes / 1e9:.4f}"


def comparison(plan: Plan, needed: int, device_bytes: int | None) -> str | None:
    """Return how the memory of a rank compares with a GPU's; None for a run on CPUs.

    Args:
        needed: bytes of the rank that needs most.
        device_bytes: memory of this host's GPU; None: unknown.
    """
    if plan.config.training.device == "cpu":
        return None
    if device_bytes is not None:
        words = "fits into" if needed <= device_bytes else "exceeds"
        return f"the largest total {words} the {device_bytes / 1e9:.2f} GB of this host's GPU"
    is_fp8 = plan.config.precision.fp8_format is not None
    for size, name in COMMON_GPUS:
        if needed <= size * 1e9 and not (is_fp8 and name in WITHOUT_FP8):
            return f"the largest total fits into the {size} GB of a GPU such as the {name}; this host has none to compare with"
    return f"the largest total exceeds the {COMMON_GPUS[-1][0]} GB of the largest GPU"


def memory_warning(
    plan: Plan, needed: int, device_bytes: int | None, host: HostUse | None = None
) -> str | None:
    """Return a warning if no step would fit into the GPU; without a GPU, if it would fit into none; on CPUs, into this host."""
    limit = COMMON_GPUS[-1][0] * 1e9 if device_bytes is None else device_bytes
    text, is_too_much = comparison(plan, needed, device_bytes), needed > limit
    if plan.config.training.device == "cpu" and host is not None:
        text, is_too_much = str(host), host.per_host > host.available
    if text is None or not is_too_much:
        return None
    return f"{text}: the run would end with an out-of-memory error\n  fix: {memory_fix(plan)}"


def memory_fix(plan: Plan, *, of_state: bool = False) -> str:
    """Return what reduces the memory of a run, as an imperative; with `of_state` what it keeps allocated before the first step."""
    remedies = list(memory_remedies(plan, of_state=of_state))
    order = "in this order, " if len(remedies) > 1 else ""
    return f"use {order}{', '.join(remedies)}"


def memory_remedies(plan: Plan, *, of_state: bool = False) -> Iterator[str]:
    """Yield the settings that reduce memory and are not used yet, those that cost least speed first.

    On CPUs, ranks of a host share its memory: splitting the model over more of them helps only on other hosts.
    """
    is_on_cpu = plan.config.training.device == "cpu"
    for remedy in _unused_remedies(plan):
        is_of_step = remedy in _OF_STEP
        is_split = remedy.startswith("a larger") or remedy in {"more ranks", "--optimizer-cpu-offload"}
        if not (of_state and is_of_step) and not (is_on_cpu and is_split):
            yield remedy
    if is_on_cpu:
        yield "more hosts (a larger --tensor-model-parallel-size or --pipeline-model-parallel-size)"
    if is_on_cpu or of_state:
        yield "a smaller model (--num-layers, --hidden-size)"


_OF_STEP: Final = (
    "--bf16",
    "--no-moe-alltoall-as-allgather",
    "--sequence-parallel",
    "a smaller --micro-batch-size",
    "--recompute-activations",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
)
"""Remedies that reduce what a step allocates, and not what the run keeps: bf16 adds master weights to half the weights."""


def _unused_remedies(plan: Plan) -> Iterator[str]:
    config, parallel, training = plan.config, plan.config.parallel, plan.config.training
    tp, dp = parallel.tensor_model_parallel_size, plan.derived.data_parallel_size
    sharding, granularity = parallel.data_parallel_sharding_strategy, training.recompute_granularity
    is_recomputed = granularity is not None or training.recompute_activations
    num_experts = config.experts.num_experts or 1
    for remedy, helps in (
        ("--bf16", config.precision.params_dtype == "float32"),
        ("--use-distributed-optimizer", dp > 1 and sharding == "no_shard"),
        ("--no-moe-alltoall-as-allgather", config.experts.moe_alltoall_as_allgather),
        ("--sequence-parallel", tp > 1 and not parallel.sequence_parallel),
        ("a smaller --micro-batch-size", training.micro_batch_size > 1),
        ("--recompute-activations", not is_recomputed),
        ("a larger --expert-model-parallel-size", parallel.expert_model_parallel_size < num_experts),
        ("a larger --tensor-model-parallel-size", tp < config.model.num_attention_heads),
        (
            "a larger --pipeline-model-parallel-size",
            parallel.pipeline_model_parallel_size < config.model.num_layers,
        ),
        ("more ranks", True),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            granularity != "full",
        ),
        (
            "--data-parallel-sharding-strategy optim_grads_params",
            dp > 1 and sharding != "optim_grads_params",
        ),
        ("--optimizer-cpu-offload", not config.optimizer.optimizer_cpu_offload),
    ):
        if helps:
            yield remedy
