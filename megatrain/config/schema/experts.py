"""Settings of MoE layers: experts, router, load balancing."""

from dataclasses import dataclass
from typing import Literal

from megatrain.config.schema.needs import above, conflict, costly, either, none_of, off, on, one_of
from megatrain.config.schema.resume_class import FUNCTION, SAFE, SHAPE, SILENT, STEPS, is_turned_on
from megatrain.config.schema.setting import ARGS, Section, setting
from megatrain.config.schema.values import AUTO

BalancingType = Literal[
    "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none"
]
_UNEQUAL_LOADS = either(
    off("experts.moe_pad_expert_input_to_capacity"),
    off("experts.moe_expert_capacity_factor"),
    words="with --moe-pad-expert-input-to-capacity: padded loads are equal, so the expert biases stay as they are",
)
_NO_SINKHORN = none_of("experts.moe_router_load_balancing_type", "sinkhorn")
_SIZES_OF_LAYERS = tuple(
    conflict(
        f"model.heterogeneous_layers_config_{source}",
        why=": its layers have no experts (--moe-layer-freq chooses the layers that have them)",
    )
    for source in ("path", "encoded_json")
)
_CAPACITY = on("experts.moe_expert_capacity_factor", why=", since no assignment is dropped")


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(Section, on_resume=FUNCTION, needs=on("experts.num_experts")):
    """Mixture of experts (MoE): layers, sizes, router, load balancing, capacity."""

    num_experts: int | None = setting(
        None,
        at_least=1,
        on_resume=SHAPE,
        multiple_of="parallel.expert_model_parallel_size",
        conflicts=_SIZES_OF_LAYERS,
    )
    """Experts per MoE layer. none: a dense model."""
    moe_layer_freq: str = setting("1", joins_words=True, on_resume=SHAPE)
    """MoE layers: a number N for the first and every Nth layer after it, or a list such as ([0]*3+[1]*45) with 1 for MoE layers."""
    moe_ffn_hidden_size: int | None = setting(AUTO, at_least=1, on_resume=SHAPE)
    """MLP width of each expert. auto: --ffn-hidden-size."""
    moe_latent_size: int | None = setting(
        None,
        at_least=1,
        on_resume=SHAPE,
        conflicts=conflict("experts.moe_use_upcycling", why=": the dense model has no projections"),
    )
    """Width of the routed experts' inputs and outputs: a projection before the dispatch reduces the hidden size to it, and one after the combination restores it. none: the hidden size."""
    moe_router_topk: int = setting(2, at_least=1)
    """Experts per token."""
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = setting(
        "softmax", needs=_NO_SINKHORN
    )
    """Function from router logits to scores."""
    moe_router_pre_softmax: bool = setting(
        False, needs=one_of("experts.moe_router_score_function", "softmax")
    )
    """Apply the softmax before top-k selection. Off: after it, so that the probabilities of a token sum to 1."""
    moe_router_num_groups: int | None = setting(
        None,
        at_least=1,
        needs=_NO_SINKHORN,
        conflicts=conflict(
            "experts.moe_router_load_balancing_type",
            "quantile_balancing",
            why=", as in Megatron-LM: its quantiles are over all experts",
            fix="remove --moe-router-num-groups and --moe-router-group-topk, or use --moe-router-load-balancing-type aux_loss",
        ),
    )
    """Groups of consecutive experts for group-limited routing: a token is routed within --moe-router-group-topk of them."""
    moe_router_group_topk: int | None = setting(None, at_least=1, needs=_NO_SINKHORN)
    """Expert groups per token, with --moe-router-num-groups."""
    moe_router_group_score_topk: int | None = setting(None, at_least=1, needs=_NO_SINKHORN)
    """Number of a group's largest scores whose sum is its score; DeepSeek-V2 uses 1, DeepSeek-V3 2. none: --moe-router-topk / --moe-router-group-topk, as in Megatron-LM."""
    moe_router_topk_scaling_factor: float | None = setting(None, above=0, needs=_NO_SINKHORN)
    """Factor of the routing probabilities."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = setting(None, on_resume=SAFE, taken_by=ARGS)
    """Dtype of router logits and scores. none: logits in that of the model."""
    moe_router_load_balancing_type: tuple[BalancingType, ...] = setting(
        ("aux_loss",), on_resume=STEPS, taken_by=ARGS
    )
    """Load balancing: aux_loss (per micro-batch), seq_aux_loss (per sequence), global_aux_loss (over the global batch so far), sinkhorn, quantile_balancing (biases of experts, replaced after each step so that loads become equal) or none. Several losses can be combined."""
    moe_aux_loss_coeff: tuple[float, ...] = setting(
        (0.0,),
        at_least=0,
        on_resume=STEPS,
        taken_by=ARGS,
        needs=one_of(
            "experts.moe_router_load_balancing_type",
            "aux_loss",
            "seq_aux_loss",
            "global_aux_loss",
            words="unless {} names a loss",
        ),
    )
    """Coefficients of the losses of --moe-router-load-balancing-type, one for each."""
    moe_z_loss_coeff: float | None = setting(None, at_least=0, on_resume=STEPS, taken_by=ARGS)
    """Coefficient of the router z-loss: the mean squared log-sum-exp of the router logits."""
    moe_router_enable_expert_bias: bool = setting(
        False,
        on_resume=SHAPE,
        adapts=is_turned_on,
        needs=_UNEQUAL_LOADS,
        conflicts=(
            conflict(
                "experts.moe_router_score_function",
                "softmax",
                why=", as in Megatron-LM",
                fix="use --moe-router-score-function sigmoid, or remove --moe-router-enable-expert-bias",
            ),
            conflict(
                "experts.moe_router_load_balancing_type",
                "sinkhorn",
                "quantile_balancing",
                why=": both balance the routing",
            ),
        ),
    )
    """Select experts by score plus a bias per expert, updated after each step towards equal loads without dropped assignments (balancing without auxiliary loss)."""
    moe_router_bias_update_rate: float = setting(
        1e-3,
        at_least=0,
        on_resume=STEPS,
        taken_by=ARGS,
        needs=(on("experts.moe_router_enable_expert_bias"), _UNEQUAL_LOADS),
    )
    """Change of the biases of --moe-router-enable-expert-bias per step."""
    moe_router_quantile_balancing_ema: float = setting(
        0.0,
        at_least=0,
        below=1,
        on_resume=STEPS,
        taken_by=ARGS,
        needs=one_of("experts.moe_router_load_balancing_type", "quantile_balancing"),
    )
    """Share of the earlier biases in the new ones with --moe-router-load-balancing-type quantile_balancing. 0: only the last global batch counts."""
    moe_router_force_load_balancing: bool = setting(False, on_resume=FUNCTION, taken_by=ARGS)
    """Route tokens at random, to measure speed with balanced loads. Not for training."""
    moe_input_jitter_eps: float | None = setting(None, at_least=0, below=1, on_resume=STEPS, taken_by=ARGS)
    """In training, multiply the router input by uniform noise in [1 - eps, 1 + eps]."""
    moe_expert_capacity_factor: float | None = setting(None, above=0, on_resume=STEPS, taken_by=ARGS)
    """Capacity of an expert, relative to equal shares of the tokens of a micro-batch; assignments above it are dropped. none: no limit."""
    moe_pad_expert_input_to_capacity: bool = setting(False, on_resume=SAFE, taken_by=ARGS, needs=_CAPACITY)
    """Pad the input of each expert to its capacity."""
    moe_token_drop_policy: Literal["probs", "position"] = setting(
        "probs", on_resume=STEPS, taken_by=ARGS, needs=_CAPACITY
    )
    """Tokens kept by an expert above its capacity: those with the highest probabilities (probs), or the first ones (position)."""
    moe_shared_expert_intermediate_size: int | None = setting(None, at_least=1, on_resume=SHAPE)
    """MLP width of a shared expert, which processes all tokens. none: no shared expert."""
    moe_shared_expert_gate: bool = setting(
        False, on_resume=SHAPE, needs=on("experts.moe_shared_expert_intermediate_size")
    )
    """Multiply the output of the shared expert by a learned sigmoid gate per token."""
    moe_shared_expert_overlap: bool = setting(
        False,
        on_resume=SAFE,
        needs=(
            on("experts.moe_shared_expert_intermediate_size"),
            one_of("training.device", "cuda", words="on a CPU, which has no streams"),
        ),
        conflicts=conflict(
            "experts.overlap_moe_expert_parallel_comm",
            why=", as in Megatron-LM: the layers of another micro-batch run in place of the shared expert",
        ),
    )
    """On GPUs, compute the shared expert on a stream of its own, while the other experts wait for their communication. No effect with a recomputed shared expert and with split backward passes."""
    moe_use_upcycling: bool = setting(False, on_resume=SILENT)
    """Start from the dense model in --load or --pretrained-checkpoint: every expert is a copy of its MLP, or a part of a copy. No effect once the run resumes its own checkpoints."""
    moe_upcycling_granularity: int = setting(
        1, at_least=1, on_resume=SILENT, needs=on("experts.moe_use_upcycling")
    )
    """Experts that --moe-use-upcycling cuts each copy of the dense MLP into."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = setting("allgather", on_resume=SAFE)
    """Communication of tokens to experts on other ranks: all-gather all tokens, or send each to its experts by all-to-all."""
    overlap_moe_expert_parallel_comm: bool = setting(
        False,
        on_resume=SAFE,
        needs=(
            either(
                off("experts.num_experts"),
                above("parallel.expert_model_parallel_size", 1),
                above("derived.expert_tensor_parallel_size", 1),
                words="with experts on one rank",
            ),
            costly(
                above(
                    "derived.num_microbatches",
                    1,
                    words="with one micro-batch per iteration, which has no other to overlap with",
                )
            ),
        ),
    )
    """Overlap the communication of experts with the layers of another micro-batch: the forward pass of a micro-batch runs in turn with the backward pass of an earlier one. If not given, only the CUDA graphs that --cuda-graph-impl auto tries do so, without pipeline stages and where memory for another micro-batch is left. With several pipeline ranks it requires a --pipeline-schedule that runs passes together: see docs/parallelism.md."""
    moe_alltoall_as_allgather: bool = setting(
        AUTO, on_resume=SAFE, needs=one_of("experts.moe_token_dispatcher_type", "alltoall")
    )
    """All-gather all tokens in place of --moe-token-dispatcher-type alltoall: the host waits for no counts. auto: where most tokens go to each rank anyway, on GPUs of one host, or nearly all. Not in Megatron-LM."""
    moe_alltoall_ranks_per_host: int = setting(
        AUTO,
        at_least=1,
        on_resume=SAFE,
        needs=(
            one_of("experts.moe_token_dispatcher_type", "alltoall"),
            off("experts.moe_alltoall_as_allgather"),
            above("parallel.expert_model_parallel_size", 1),
        ),
    )
    """Ranks of --expert-model-parallel-size on each host: the all-to-all sends a token once to each host with some of its experts, where ranks forward it to one another, and receives one sum from it. 1: a token goes once to each rank. auto: the ranks of a host where this saves more on the network than forwarding costs, else 1. Not in Megatron-LM."""
    moe_fp8_dispatch: bool = setting(False, on_resume=SAFE, needs=on("precision.fp8_format"))
    """Cast tokens to FP8 before they are sent to experts in FP8, and in the backward pass the gradients of their sums: an all-to-all sends half of the bytes there, while sums return in the dtype of the weights. The GEMMs of experts read the same codes as without it; their weight gradients are computed from the rounded rows, with every dispatcher. Not in Megatron-LM."""
    moe_expert_rank_capacity_factor: float | None = setting(
        AUTO,
        above=0,
        on_resume=SAFE,
        needs=either(
            above("parallel.expert_model_parallel_size", 1),
            above("derived.expert_tensor_parallel_size", 1),
            words="with experts on one rank",
        ),
    )
    """Memory for the token-expert assignments of a rank after an all-gather of tokens, relative to an even load. If a load is larger, the memory grows and the step is computed again: nothing is dropped. none: memory for every possible assignment. auto: 1.25 on GPUs, where every possible one would take more than twice the memory of an even load."""

    @property
    def sends_by_alltoall(self) -> bool:
        """Return whether an all-to-all sends tokens to expert ranks; `flex` does, too."""
        is_given = self.moe_token_dispatcher_type != "allgather"  # noqa: S105 (no password)
        return is_given and not self.moe_alltoall_as_allgather
