"""Settings of MoE layers: experts, router, load balancing."""

from dataclasses import dataclass, field
from typing import Literal

from megatrain.config.schema.values import AUTO, CheckedSection, in_range, several_words


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(CheckedSection):
    """Mixture of experts (MoE): layers, sizes, router, load balancing, capacity."""

    num_experts: int | None = field(default=None, metadata=in_range(at_least=1))
    """Experts per MoE layer. none: a dense model."""
    moe_layer_freq: str = field(default="1", metadata=several_words())
    """MoE layers: a number N for the first and every Nth layer after it, or a list such as ([0]*3+[1]*45) with 1 for MoE layers."""
    moe_ffn_hidden_size: int | None = field(default=AUTO, metadata=in_range(at_least=1))
    """MLP width of each expert. auto: --ffn-hidden-size."""
    moe_latent_size: int | None = field(default=None, metadata=in_range(at_least=1))
    """Width of the routed experts' inputs and outputs: a projection before the dispatch reduces the hidden size to it, and one after the combination restores it. none: the hidden size."""
    moe_router_topk: int = field(default=2, metadata=in_range(at_least=1))
    """Experts per token."""
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """Function from router logits to scores."""
    moe_router_pre_softmax: bool = False
    """Apply the softmax before top-k selection. Off: after it, so that the probabilities of a token sum to 1."""
    moe_router_num_groups: int | None = field(default=None, metadata=in_range(at_least=1))
    """Groups of consecutive experts for group-limited routing: a token is routed within --moe-router-group-topk of them."""
    moe_router_group_topk: int | None = field(default=None, metadata=in_range(at_least=1))
    """Expert groups per token, with --moe-router-num-groups."""
    moe_router_group_score_topk: int | None = field(default=None, metadata=in_range(at_least=1))
    """Number of a group's largest scores whose sum is its score; DeepSeek-V2 uses 1, DeepSeek-V3 2. none: --moe-router-topk / --moe-router-group-topk, as in Megatron-LM."""
    moe_router_topk_scaling_factor: float | None = field(default=None, metadata=in_range(above=0))
    """Factor of the routing probabilities."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Dtype of router logits and scores. none: logits in that of the model."""
    moe_router_load_balancing_type: tuple[str, ...] = ("aux_loss",)
    """Load balancing: aux_loss (per micro-batch), seq_aux_loss (per sequence), global_aux_loss (over the global batch so far), sinkhorn, quantile_balancing (biases of experts, replaced after each step so that loads become equal) or none. Several losses can be combined."""
    moe_aux_loss_coeff: tuple[float, ...] = (0.0,)
    """Coefficients of the losses of --moe-router-load-balancing-type, one for each."""
    moe_z_loss_coeff: float | None = field(default=None, metadata=in_range(at_least=0))
    """Coefficient of the router z-loss: the mean squared log-sum-exp of the router logits."""
    moe_router_enable_expert_bias: bool = False
    """Select experts by score plus a bias per expert, updated after each step towards equal loads without dropped assignments (balancing without auxiliary loss)."""
    moe_router_bias_update_rate: float = field(default=1e-3, metadata=in_range(at_least=0))
    """Change of the biases of --moe-router-enable-expert-bias per step."""
    moe_router_quantile_balancing_ema: float = field(default=0.0, metadata=in_range(at_least=0, below=1))
    """Share of the earlier biases in the new ones with --moe-router-load-balancing-type quantile_balancing. 0: only the last global batch counts."""
    moe_router_force_load_balancing: bool = False
    """Route tokens at random, to measure speed with balanced loads. Not for training."""
    moe_input_jitter_eps: float | None = field(default=None, metadata=in_range(at_least=0, below=1))
    """In training, multiply the router input by uniform noise in [1 - eps, 1 + eps]."""
    moe_expert_capacity_factor: float | None = field(default=None, metadata=in_range(above=0))
    """Capacity of an expert, relative to equal shares of the tokens of a micro-batch; assignments above it are dropped. none: no limit."""
    moe_pad_expert_input_to_capacity: bool = False
    """Pad the input of each expert to its capacity."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"  # noqa: S105 (no password)
    """Tokens kept by an expert above its capacity: those with the highest probabilities (probs), or the first ones (position)."""
    moe_shared_expert_intermediate_size: int | None = field(default=None, metadata=in_range(at_least=1))
    """MLP width of a shared expert, which processes all tokens. none: no shared expert."""
    moe_shared_expert_gate: bool = False
    """Multiply the output of the shared expert by a learned sigmoid gate per token."""
    moe_shared_expert_overlap: bool = False
    """On GPUs, compute the shared expert on a stream of its own, while the other experts wait for their communication. No effect with a recomputed shared expert and with split backward passes."""
    moe_use_upcycling: bool = False
    """Start from the dense model in --load or --pretrained-checkpoint: every expert is a copy of its MLP, or a part of a copy. No effect once the run resumes its own checkpoints."""
    moe_upcycling_granularity: int = field(default=1, metadata=in_range(at_least=1))
    """Experts that --moe-use-upcycling cuts each copy of the dense MLP into."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "allgather"  # noqa: S105
    """Communication of tokens to experts on other ranks: all-gather all tokens, or send each to its experts by all-to-all."""
    overlap_moe_expert_parallel_comm: bool = False
    """Overlap the communication of experts with the layers of another micro-batch: the forward pass of a micro-batch runs in turn with the backward pass of an earlier one. With several pipeline ranks it requires a --pipeline-schedule that runs passes together: see docs/parallelism.md."""
    moe_alltoall_as_allgather: bool = AUTO
    """All-gather all tokens in place of --moe-token-dispatcher-type alltoall: the host waits for no counts, and memory holds every possible assignment. auto: where nearly all tokens go to each rank anyway, and the activations of experts take at most twice the memory of an even load. Not in Megatron-LM."""

    @property
    def sends_by_alltoall(self) -> bool:
        """Return whether an all-to-all sends tokens to expert ranks, of a resolved configuration."""
        is_given = self.moe_token_dispatcher_type == "alltoall"  # noqa: S105 (no password)
        return is_given and not self.moe_alltoall_as_allgather
