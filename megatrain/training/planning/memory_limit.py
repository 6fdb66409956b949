"""Compares the planned memory of a rank with that of a GPU, and lists the settings that reduce it.

largest total, memory of this host's GPU (None: there is none) ─> a line for the memory table, or a warning
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from megatrain.config import Plan

COMMON_GPUS: Final = ((40, "A100"), (80, "H100"), (141, "H200"), (192, "B200"), (288, "B300"))
"""Nominal memory in GB, ascending, and a GPU that has it."""
WITHOUT_FP8: Final = ("A100",)
"""GPUs among these that have no FP8 products."""


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


def memory_warning(plan: Plan, needed: int, device_bytes: int | None) -> str | None:
    """Return a warning if no step would fit into the GPU; without a GPU, if it would fit into none."""
    limit = COMMON_GPUS[-1][0] * 1e9 if device_bytes is None else device_bytes
    text = comparison(plan, needed, device_bytes)
    if text is None or needed <= limit:
        return None
    remedies = list(memory_remedies(plan))
    return f"{text}: the run would end with an out-of-memory error\n  fix: use, in this order, {', '.join(remedies)}"


def memory_remedies(plan: Plan) -> Iterator[str]:
    """Yield the settings that reduce memory and are not used yet, those that cost least speed first."""
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
