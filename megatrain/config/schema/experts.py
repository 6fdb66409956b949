"""Layers of experts (MoE) in place of MLPs: how many there are, how a router picks some for each token, and what keeps their loads even."""

from dataclasses import dataclass, field
from typing import Literal

from megatrain.config.schema.values import AUTO, CheckedSection, in_range


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(CheckedSection):
    """Experts (MoE): which layers have them, their sizes, the router, balance, capacity."""

    num_experts: int | None = field(default=None, metadata=in_range(at_least=1))
    """Experts of each layer that has them; none: a dense model."""
    moe_layer_freq: str = "1"
    """Layers with experts: every such layer, from the first one on, or a list such as ([0]*3+[1]*45) with 1 for each of them."""
    moe_ffn_hidden_size: int | None = field(default=AUTO, metadata=in_range(at_least=1))
    """Width inside each expert. Left open: --ffn-hidden-size."""
    moe_router_topk: int = field(default=2, metadata=in_range(at_least=1))
    """Experts that each token goes to."""
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """How the router makes scores of its logits."""
    moe_router_pre_softmax: bool = False
    """Take the softmax over all experts, and then the best of them; without it over the best alone, so that their weights sum to 1."""
    moe_router_num_groups: int | None = field(default=None, metadata=in_range(at_least=1))
    """Groups of neighbours that the experts are cut into; a token goes to experts of --moe-router-group-topk of them alone."""
    moe_router_group_topk: int | None = field(default=None, metadata=in_range(at_least=1))
    """Groups of experts that each token may go to."""
    moe_router_topk_scaling_factor: float | None = field(default=None, metadata=in_range(above=0))
    """Factor of the weights by which experts' outputs are summed."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Number format of the router's logits and scores; none: logits in that of the model."""
    moe_router_load_balancing_type: tuple[str, ...] = ("aux_loss",)
    """What keeps the loads of experts even: aux_loss (of a micro-batch), seq_aux_loss (of each sequence), global_aux_loss (of the global batch so far), sinkhorn or none; several losses may be given."""
    moe_aux_loss_coeff: tuple[float, ...] = (0.0,)
    """Factors of the losses of --moe-router-load-balancing-type, one each."""
    moe_z_loss_coeff: float | None = field(default=None, metadata=in_range(at_least=0))
    """Factor of the mean square of the logarithm of the router's softmax sum, which is added to the loss."""
    moe_router_enable_expert_bias: bool = False
    """Pick experts by scores with a bias for each expert, which moves after every step towards even loads (without an auxiliary loss)."""
    moe_router_bias_update_rate: float = field(default=1e-3, metadata=in_range(at_least=0))
    """How far the biases of --moe-router-enable-expert-bias move each step."""
    moe_router_force_load_balancing: bool = False
    """Pick experts at random, whatever the router says: for measuring speed with even loads, never for training."""
    moe_input_jitter_eps: float | None = field(default=None, metadata=in_range(at_least=0, below=1))
    """Multiply what the router sees with noise of this size around 1 in training."""
    moe_expert_capacity_factor: float | None = field(default=None, metadata=in_range(above=0))
    """An expert takes at most this times its even share of a micro-batch's tokens, and others are dropped; none: nothing is dropped."""
    moe_pad_expert_input_to_capacity: bool = False
    """Let every expert compute as many rows as its capacity."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"  # noqa: S105 (no password)
    """Which tokens stay where an expert's capacity is short: those with the highest scores, or the first ones."""
    moe_shared_expert_intermediate_size: int | None = field(default=None, metadata=in_range(at_least=1))
    """Width of an MLP beside the experts that sees all tokens; none: there is none."""
    moe_shared_expert_gate: bool = False
    """Multiply the shared MLP's output with a sigmoid of the token."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "allgather"  # noqa: S105
    """How tokens travel to ranks with other experts: all of them to all ranks, or each to where it is wanted."""
