"""The settings that reduce the memory of a run, as the fix of an error or of a warning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatrain.config import Plan


def gigabytes(num_bytes: int) -> str:
    """Return a size in GB."""
    return f"{num_bytes / 1e9:.2f}" if num_bytes >= 1e8 or not num_bytes else f"{num_bytes / 1e9:.4f}"


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
    found = _remedies(plan, of_step=not of_state, splits=not is_on_cpu)
    yield from (remedy for remedy, helps in found if helps)
    if is_on_cpu:
        yield "more hosts (a larger --tensor-model-parallel-size or --pipeline-model-parallel-size)"
    if is_on_cpu or of_state:
        yield "a smaller model (--num-layers, --hidden-size)"


def saves_activations(plan: Plan) -> bool:
    """Return whether MLPs save what their activations return. FP8 layers of `local` save its input."""
    is_own_fp8 = plan.config.precision.fp8_format is not None and plan.derived.transformer_impl == "local"
    return not plan.config.training.recompute_mlp_act and not is_own_fp8


def _remedies(plan: Plan, *, of_step: bool, splits: bool) -> Sequence[tuple[str, bool]]:
    """Return all remedies, those that cost least speed first, and whether each helps.

    Args:
        of_step: count those that reduce what a step allocates, and not what the run keeps: bf16 adds master weights to half the
            weights.
        splits: count those that divide memory over more ranks, or move it from GPUs to the host.
    """
    config, parallel, training = plan.config, plan.config.parallel, plan.config.training
    tp, dp = parallel.tensor_model_parallel_size, plan.derived.data_parallel_size
    sharding, granularity = parallel.data_parallel_sharding_strategy, training.recompute_granularity
    num_experts, is_local = config.experts.num_experts or 1, plan.derived.transformer_impl == "local"
    return (
        ("--bf16", of_step and config.precision.params_dtype == "float32"),
        ("--use-distributed-optimizer", dp > 1 and sharding == "no_shard"),
        ("--no-moe-alltoall-as-allgather", of_step and config.experts.moe_alltoall_as_allgather),
        ("--sequence-parallel", of_step and tp > 1 and not parallel.sequence_parallel),
        ("a smaller --micro-batch-size", of_step and training.micro_batch_size > 1),
        ("--recompute-mlp-act", of_step and is_local and saves_activations(plan)),
        ("--recompute-activations", of_step and not training.recomputes_layers),
        ("--cpu-offloading-num-layers", of_step and splits and not training.offloads_activations),
        (
            "a larger --expert-model-parallel-size",
            splits and parallel.expert_model_parallel_size < num_experts,
        ),
        ("a larger --tensor-model-parallel-size", splits and tp < config.model.num_attention_heads),
        (
            "a larger --pipeline-model-parallel-size",
            splits and parallel.pipeline_model_parallel_size < config.model.num_layers,
        ),
        ("more ranks", splits),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            of_step and granularity != "full",
        ),
        (
            "--data-parallel-sharding-strategy optim_grads_params",
            dp > 1 and sharding != "optim_grads_params",
        ),
        ("--optimizer-cpu-offload", splits and not config.optimizer.optimizer_cpu_offload),
    )
