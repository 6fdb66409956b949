"""How the work is spread over ranks. The data-parallel size follows from the number of ranks that are started."""

from dataclasses import dataclass, field
from typing import Literal

from megatrain.config.schema.values import AUTO, CheckedSection, in_range


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(CheckedSection):
    """Parallelism: how the model and its optimizer are spread over ranks."""

    tensor_model_parallel_size: int = field(default=1, metadata=in_range(at_least=1))
    """Ranks over which each layer's matrices are split (tp)."""
    pipeline_model_parallel_size: int = field(default=1, metadata=in_range(at_least=1))
    """Stages into which the layers are cut (pp)."""
    context_parallel_size: int = field(default=1, metadata=in_range(at_least=1))
    """Ranks over which the sequence of each sample is split, in all layers (cp)."""
    cp_comm_type: tuple[str, ...] = ()
    """How context ranks share keys and values: p2p (they travel around a ring), all_gather, a2a (ranks exchange rows of all heads for all rows of some), a2a+p2p or a2a+all_gather (a2a between neighbours, the other between groups of them). One for all layers, or one for each. Left out: p2p, and all_gather with windows or documents."""
    hierarchical_context_parallel_sizes: tuple[int, ...] = ()
    """For --cp-comm-type a2a+p2p: how many neighbours exchange heads, and how many such groups there are."""
    context_parallel_chunk_means: bool = False
    """Let each context rank's mean over its own tokens count alike, as in Megatron-LM, whatever the loss mask: then the loss depends on how samples are split. Not in Megatron-LM."""
    expert_model_parallel_size: int = field(default=1, metadata=in_range(at_least=1))
    """Ranks over which the experts of a layer are spread (ep)."""
    expert_tensor_parallel_size: int | None = field(default=None, metadata=in_range(at_least=1))
    """Ranks over which the matrices of each expert are split (etp). Left out: as other layers, by --tensor-model-parallel-size."""
    use_tp_pp_dp_mapping: bool = False
    """Number the ranks so that the stages of a pipeline are closer to each other than its replicas are."""
    sequence_parallel: bool = False
    """Split norms and the residual stream along the sequence over the tensor-parallel ranks."""
    use_distributed_optimizer: bool = True
    """Spread optimizer state over the data-parallel ranks (ZeRO-1). Megatron-LM leaves it off unless asked."""
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = AUTO
    """What is spread over the data-parallel ranks: nothing, optimizer state (ZeRO-1), gradients too (ZeRO-2), weights too (ZeRO-3). Left open: optim, or by --use-megatron-fsdp and --no-use-distributed-optimizer. Tied embeddings stay whole in ZeRO-2 and 3. Megatron-LM reads it with --use-megatron-fsdp alone."""
    use_megatron_fsdp: bool = False
    """Spread weights, gradients and optimizer state as Megatron-FSDP does: --data-parallel-sharding-strategy is optim_grads_params unless given."""
    num_distributed_optimizer_instances: int = field(default=1, metadata=in_range(at_least=1))
    """Parts of neighbours into which the data-parallel ranks are cut; what is spread is spread within each part, and sums travel between them."""
    overlap_grad_reduce: bool = True
    """Sum each layer's gradients over the replicas while the backward pass goes on with the next ones. Off: when it has ended."""
    overlap_param_gather: bool = True
    """Gather updated weights while the optimizer and the next forward pass go on. Off: wait for each layer's before the next update."""
    distributed_backend: Literal["nccl", "gloo"] = AUTO
    """What carries collectives. Left open: nccl on GPUs, gloo on CPUs."""
    distributed_timeout_minutes: int = field(default=10, metadata=in_range(at_least=1))
    """Minutes that a collective may take before the run fails; 60 at least until the first iteration has ended."""
    distributed_timeout_seconds_after_init: int | None = field(default=None, metadata=in_range(at_least=1))
    """Seconds that a collective may take once the first iteration has ended, in place of --distributed-timeout-minutes."""
    world_size: int | None = field(default=None, metadata=in_range(at_least=1))
    """Ranks that --dry-run takes to be started. Left out: those that are, or as many as hold the model once."""
