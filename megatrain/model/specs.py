"""Layer specs: the parts of each layer of the model, as data.

    LayerSpec = mixer (attention) + mlp or experts, each in a branch of the residual stream:

    pre   x + f(norm x)        post   x + norm(f x)        both   x + norm(f(norm x))

A spec is independent of dtype, ranks and kernels, which the implementation chooses.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from megatrain.config.derive.layer_sizes import layer_table
from megatrain.config.derive.model import activation_of, attention_scale, matrix_init_std
from megatrain.config.derive.patterns import parse_layer_pattern, parse_window
from megatrain.config.model_spec.delta_rule import LinearSizes
from megatrain.config.model_spec.experts import ExpertSizes
from megatrain.config.model_spec.latent_attention import LatentSizes
from megatrain.config.model_spec.layer import LayerSizes
from megatrain.config.plan import Activation
from megatrain.config.schema.experts import ExpertsConfig
from megatrain.config.schema.model import ModelConfig
from megatrain.kernels.activations import ActivationFunction
from megatrain.kernels.rotary import LlamaScaling, RotarySpec, YarnScaling
from megatrain.model.user_loss import UserLoss

NormPosition = Literal["pre", "post", "both"]


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """Every norm of a model; those of queries and keys have options of their own in `AttentionSpec`."""

    kind: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    epsilon: float = 1e-5
    is_stored_minus_one: bool = False
    """Weights are stored as weight - 1 (`--apply-layernorm-1p`)."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Causal self-attention with grouped queries."""

    num_heads: int
    num_query_groups: int
    head_channels: int
    """Channels of a head of queries and keys."""
    latent: LatentSizes | None = None
    """Latents of queries, keys and values (multi-latent attention); None: one projection."""
    rotary: RotarySpec | None = None
    """RoPE; None: none is applied."""
    window: int | None = None
    """Number of earlier tokens that a query attends to; None: all."""
    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(head channels)."""
    softcap: float | None = None
    """Limit of the scores: cap * tanh(score / cap); None: no limit."""
    sink: Literal["none", "zero", "learned"] = "none"
    """Sink logit of each head, in the softmax denominator: 0 or learned."""
    dropout: float = 0.0
    """Probability that training drops an attention probability."""
    qk_norm: Literal["none", "head", "all_heads", "latent"] = "none"
    """Norm of queries and keys, over the channels of a head or of all heads; or of the latents."""
    qk_norm_decays: bool = False
    """Weight decay applies to these norms."""
    has_output_gate: bool = False
    """The output of each head is multiplied by the sigmoid of a projection of the layer's input."""
    has_qkv_bias: bool = False
    has_bias: bool = False
    """The output projection has a bias."""

    @property
    def value_channels(self) -> int:
        """Channels of a head of values."""
        return self.head_channels if self.latent is None else self.latent.value_channels

    @property
    def rope_channels(self) -> int:
        """Channels of a head that RoPE receives; it may leave some unchanged."""
        return self.head_channels if self.latent is None else self.latent.rotary_channels


@dataclass(frozen=True, kw_only=True)
class LinearAttentionSpec:
    """Linear attention by the gated delta rule, in place of attention."""

    sizes: LinearSizes
    activation: Activation = "swiglu"
    """Its function is that of the convolved queries, keys and values, and of the gate."""


@dataclass(frozen=True, kw_only=True)
class MlpSpec:
    """MLP: down(act(up x)), or gated: down(act(gate x) * (up x + offset))."""

    ffn_hidden_size: int
    activation: Activation = "swiglu"
    """Activation of the MLP: gate and function."""
    activation_fn: ActivationFunction | None = None
    """Custom activation function that replaces the one of `activation`."""
    clamp: float | None = None
    """Upper limit of gate, and limit of the absolute value of up; None: no limit."""
    offset: float = 0.0
    """Added to up."""
    has_bias: bool = False

    @property
    def is_gated(self) -> bool:
        return self.activation in ("swiglu", "geglu_tanh", "quick_geglu")

    @property
    def fc1_names(self) -> list[str]:
        """Canonical names of the tensors that the first linear layer fuses."""
        return ["gate", "up"] if self.is_gated else ["up"]


BalancingLoss = Literal["aux_loss", "seq_aux_loss", "global_aux_loss"]
"""Load balancing loss over the tokens of a micro-batch, of a sequence, or of a global batch."""


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """Router: selects the experts of each token and computes their probabilities."""

    num_experts: int
    top_k: int
    score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    is_pre_softmax: bool = False
    """The softmax is over all experts, not over the selected ones."""
    num_groups: int | None = None
    """Groups of consecutive experts, `group_top_k` of them per token, by the sums of their `group_score_top_k` largest scores."""
    group_top_k: int | None = None
    group_score_top_k: int | None = None
    scaling_factor: float | None = None
    """Factor of the probabilities; None: 1."""
    dtype: Literal["fp32", "fp64"] | None = None
    """Dtype of logits and scores; None: logits in the model's dtype."""
    losses: tuple[tuple[BalancingLoss, float], ...] = ()
    """Load balancing losses with their coefficients."""
    is_sinkhorn: bool = False
    """Experts are selected by a Sinkhorn plan of the scores."""
    quantile_ema: float | None = None
    """Experts are selected by logits with a bias per expert, which each step replaces by negative load quantiles; the share of
    the bias before it in the new one. None: they are not."""
    z_loss_coeff: float = 0.0
    has_bias: bool = False
    """The logits have a bias."""
    has_expert_bias: bool = False
    """The selection adds a bias per expert to the scores."""
    bias_update_rate: float = 1e-3
    """Change of that bias per step; 0 with `is_padded`: padded loads are equal."""
    jitter: float = 0.0
    capacity_factor: float | None = None
    """Maximum load of an expert relative to the mean load; None: no assignment is dropped."""
    drops_last: bool = False
    """Drop the last tokens, not those with the lowest probabilities."""
    is_padded: bool = False
    """Pad every expert's rows to its capacity."""
    is_forced: bool = False
    """Select experts at random, for speed measurements with even loads."""

    @property
    def has_selection_bias(self) -> bool:
        """The model has a bias per expert for the selection, which is no parameter."""
        return self.has_expert_bias or self.quantile_ema is not None

    @property
    def has_bias_updates(self) -> bool:
        """That bias is updated from other numbers than the loads: load quantiles, or loads without dropped assignments."""
        return self.quantile_ema is not None or (self.has_expert_bias and self.capacity_factor is not None)


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """Experts in place of an MLP, some of them per token."""

    router: RouterSpec
    expert: MlpSpec
    """Each routed expert."""
    shared: MlpSpec | None = None
    """Shared expert, which computes all tokens; None: none."""
    has_shared_gate: bool = False
    """The shared expert's output is multiplied by a sigmoid gate of the token."""
    latent_size: int | None = None
    """Width of the routed experts' inputs and outputs, projected from and to the hidden size; None: the hidden size."""


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer."""

    mixer: AttentionSpec | LinearAttentionSpec | None
    """Attention or a linear one; None: neither."""
    mlp: MlpSpec | ExpertsSpec | None
    """MLP or experts; None: neither."""
    norm_position: NormPosition = "pre"
    is_parallel: bool = False
    """Both branches read the input of the layer."""


@dataclass(frozen=True, kw_only=True)
class MtpSpec:
    """Multi-token prediction: layers like the last one of the model; each predicts one token further ahead."""

    num_layers: int
    loss_factor: float
    """Factor of the mean of their losses."""


@dataclass(frozen=True, kw_only=True)
class GptSpec:
    """A whole model, the same on all ranks, before each builds its part."""

    hidden_size: int
    vocab_size: int
    """Vocabulary size of the tokenizer."""
    padded_vocab_size: int
    layers: tuple[LayerSpec, ...]
    is_tied: bool
    """The head uses the embedding's weight."""
    init_std: float
    output_init_std: float
    """Standard deviation for layers whose output is added to the residual stream."""
    embedding_init_std: float | None = None
    """Standard deviation for the embedding; None: `init_std`."""
    head_init_std: float | None = None
    """Standard deviation for an untied output weight; None: `init_std`."""
    norm: NormSpec = field(default_factory=NormSpec)
    num_positions: int | None = None
    """Rows of the learned position embedding; None: none."""
    embedding_multiplier: float = 1.0
    """Factor of the embedding's output, rounded to the weights' dtype first, as in Gemma."""
    width_multiplier: float = 1.0
    """Second factor of the embedding's output, not rounded (muP)."""
    hidden_dropout: float = 0.0
    """Dropout probability of the outputs of the branches and the embedding."""
    is_residual_fp32: bool = False
    """The residual stream is in the accumulation dtype, not in that of the weights."""
    logit_scale: float = 1.0
    """Factor of the logits."""
    logit_softcap: float | None = None
    """Limit of the logits: cap * tanh(logit / cap); None: no limit."""
    z_loss_coeff: float = 0.0
    """Coefficient of the squared log-sum-exp of each token's logits, which is added to its loss."""
    user_loss: UserLoss | None = None
    """Loss that is trained in place of the cross-entropy (--loss); None: the cross-entropy."""
    mtp: MtpSpec | None = None
    """Multi-token prediction; None: none."""

    @property
    def num_mtp_layers(self) -> int:
        """Layers of multi-token prediction. Their numbers follow those of the other layers."""
        return 0 if self.mtp is None else self.mtp.num_layers

    @property
    def all_layers(self) -> tuple[LayerSpec, ...]:
        """Layers by number, with those of multi-token prediction."""
        return self.layers + self.layers[-1:] * self.num_mtp_layers

    def layer_name(self, number: int) -> str:
        """Return the prefix of the canonical names of a layer."""
        depth = number - len(self.layers)
        return f"decoder.layers.{number}" if depth < 0 else f"mtp.layers.{depth}"

    @property
    def routers(self) -> dict[int, RouterSpec]:
        """Return the routers by layer number."""
        return {
            number: layer.mlp.router
            for number, layer in enumerate(self.all_layers)
            if isinstance(layer.mlp, ExpertsSpec)
        }

    @property
    def routers_by_name(self) -> dict[str, RouterSpec]:
        """Return the same routers, in the same order, by the prefix of their canonical names."""
        return {f"{self.layer_name(number)}.mlp.router": router for number, router in self.routers.items()}


def gpt_spec(
    model: ModelConfig, experts: ExpertsConfig, *, vocab_size: int, qk_norm_decays: bool = False
) -> GptSpec:
    """Build the spec that a resolved configuration describes."""
    init_std = matrix_init_std(model)[0]
    has_positions = model.position_embedding_type == "learned_absolute"
    embedding_std = model.embedding_init_method_std
    embedding_std = model.init_method_std if embedding_std is None else embedding_std
    return GptSpec(
        hidden_size=model.hidden_size,
        vocab_size=vocab_size,
        padded_vocab_size=model.padded_vocab_size,
        layers=_layers(model, experts, attention_scale(model)[0], qk_norm_decays),
        is_tied=not model.untie_embeddings_and_output_weights,
        init_std=init_std,
        output_init_std=init_std / math.sqrt(2 * model.num_layers),
        embedding_init_std=embedding_std,
        head_init_std=embedding_std if model.use_mup else None,
        norm=NormSpec(
            kind=model.normalization, epsilon=model.norm_epsilon, is_stored_minus_one=model.apply_layernorm_1p
        ),
        num_positions=model.max_position_embeddings if has_positions else None,
        embedding_multiplier=model.embedding_multiplier,
        width_multiplier=model.mup_embedding_mult if model.use_mup else 1.0,
        hidden_dropout=model.hidden_dropout,
        is_residual_fp32=model.fp32_residual_connection,
        logit_scale=model.mup_output_mult if model.use_mup else 1.0,
        logit_softcap=model.final_logit_softcapping,
        z_loss_coeff=model.z_loss_coeff,
        mtp=MtpSpec(num_layers=model.mtp_num_layers, loss_factor=model.mtp_loss_scaling_factor)
        if model.mtp_num_layers
        else None,
    )


def _layers(
    model: ModelConfig, experts: ExpertsConfig, scale: float | None, qk_norm_decays: bool
) -> tuple[LayerSpec, ...]:
    has_window = parse_layer_pattern(model.window_attn_skip_freq, model.num_layers, one_means=True)
    has_rotary = parse_layer_pattern(model.no_rope_freq, model.num_layers, one_means=False)
    left = parse_window(model.window_size)
    rotary = rotary_of_windows = _rotary(model)
    if rotary is not None and left is not None and model.window_rotary_base is not None:
        rotary_of_windows = dataclasses.replace(
            rotary, base=model.window_rotary_base, interpolation=1.0, scaling=None
        )
    has_bias = not model.disable_bias_linear
    layers = []
    for number, sizes in enumerate(layer_table(model, experts).layers):
        attention = AttentionSpec(
            num_heads=sizes.num_heads,
            num_query_groups=sizes.num_query_groups,
            head_channels=sizes.head_channels,
            latent=sizes.latent,
            rotary=(rotary_of_windows if has_window[number] else rotary) if has_rotary[number] else None,
            window=left if has_window[number] else None,
            scale=scale,
            softcap=model.attn_logit_softcapping,
            sink=_SINKS[model.softmax_type],
            dropout=model.attention_dropout,
            qk_norm=_qk_norm(model),
            qk_norm_decays=qk_norm_decays,
            has_output_gate=model.attention_output_gate,
            has_qkv_bias=(has_bias or model.add_qkv_bias) and sizes.latent is None,
            has_bias=has_bias,
        )
        mlp = MlpSpec(
            ffn_hidden_size=sizes.ffn_hidden_size,
            activation=activation_of(model)[0],
            clamp=model.activation_func_clamp_value,
            offset=model.glu_linear_offset,
            has_bias=has_bias,
        )
        layers.append(
            LayerSpec(
                mixer=attention if sizes.num_heads else _linear_attention(model, sizes),
                mlp=_mlp(mlp, sizes, experts),
                norm_position=model.norm_position,
                is_parallel=model.use_parallel_residual,
            )
        )
    return tuple(layers)


def _linear_attention(model: ModelConfig, sizes: LayerSizes) -> LinearAttentionSpec | None:
    """Return the linear attention of a layer, if it has one. Its GELU is exact, as in Megatron-LM, also where that of the MLP is not."""
    if sizes.linear is None:
        return None
    kind = activation_of(model)[0]
    return LinearAttentionSpec(sizes=sizes.linear, activation="gelu" if kind == "gelu_tanh" else kind)


def _mlp(dense: MlpSpec, sizes: LayerSizes, experts: ExpertsConfig) -> MlpSpec | ExpertsSpec | None:
    """Build the MLP or the experts of a layer; `dense` is the MLP that all layers share, except for its width."""
    if sizes.experts is None:
        return dense if sizes.ffn_hidden_size else None
    width = sizes.experts.shared_ffn_hidden_size
    return ExpertsSpec(
        router=_router(experts, sizes.experts, has_bias=dense.has_bias),
        expert=dataclasses.replace(dense, ffn_hidden_size=sizes.experts.ffn_hidden_size),
        shared=dataclasses.replace(dense, ffn_hidden_size=width) if width else None,
        has_shared_gate=experts.moe_shared_expert_gate,
        latent_size=sizes.experts.latent_size or None,
    )


def _router(experts: ExpertsConfig, sizes: ExpertSizes, *, has_bias: bool) -> RouterSpec:
    kinds, best = experts.moe_router_load_balancing_type, experts.moe_router_group_topk
    factors = dict(zip(kinds, experts.moe_aux_loss_coeff, strict=True))
    is_padded = experts.moe_pad_expert_input_to_capacity and experts.moe_expert_capacity_factor is not None
    return RouterSpec(
        num_experts=sizes.num_experts,
        top_k=sizes.top_k,
        score_function=experts.moe_router_score_function,
        is_pre_softmax=experts.moe_router_pre_softmax and experts.moe_router_score_function == "softmax",
        num_groups=experts.moe_router_num_groups,
        group_top_k=best,
        group_score_top_k=best and (experts.moe_router_group_score_topk or sizes.top_k // best),
        scaling_factor=experts.moe_router_topk_scaling_factor,
        dtype=experts.moe_router_dtype,
        losses=tuple((loss, factors[loss]) for loss in get_args(BalancingLoss) if factors.get(loss)),
        is_sinkhorn="sinkhorn" in kinds,
        quantile_ema=experts.moe_router_quantile_balancing_ema if "quantile_balancing" in kinds else None,
        z_loss_coeff=experts.moe_z_loss_coeff or 0.0,
        has_bias=has_bias,
        has_expert_bias=experts.moe_router_enable_expert_bias,
        bias_update_rate=0.0 if is_padded else experts.moe_router_bias_update_rate,
        jitter=experts.moe_input_jitter_eps or 0.0,
        capacity_factor=experts.moe_expert_capacity_factor,
        drops_last=experts.moe_token_drop_policy == "position",  # noqa: S105 (no password)
        is_padded=is_padded,
        is_forced=experts.moe_router_force_load_balancing,
    )


def _qk_norm(model: ModelConfig) -> Literal["none", "head", "all_heads", "latent"]:
    width = "latent" if model.multi_latent_attention else model.qk_layernorm_width
    return width if model.qk_layernorm else "none"


_SINKS: dict[str, Literal["none", "zero", "learned"]]
_SINKS = {"vanilla": "none", "off-by-one": "zero", "learnable": "learned"}


def _rotary(model: ModelConfig) -> RotarySpec | None:
    if model.multi_latent_attention:  # has RoPE under every type of position embedding
        return _rotary_of_latents(model)
    if model.position_embedding_type not in ("rope", "yarn"):
        return None
    base, is_interleaved = float(model.rotary_base), model.rotary_interleaved
    if model.position_embedding_type == "yarn":  # rotates all channels, and scales by its own factor alone
        return RotarySpec(base=base, is_interleaved=is_interleaved, scaling=_yarn(model))
    return RotarySpec(
        base=base,
        rotary_percent=model.rotary_percent,
        is_interleaved=is_interleaved,
        interpolation=float(model.rotary_seq_len_interpolation_factor or 1),
        scaling=LlamaScaling(factor=model.rope_scaling_factor) if model.use_rope_scaling else None,
    )


def _rotary_of_latents(model: ModelConfig) -> RotarySpec:
    """Return the RoPE of multi-latent attention: adjacent channels form a pair, as in DeepSeek-V2 and Megatron-LM."""
    is_yarn = model.rope_type == "yarn"
    return RotarySpec(
        base=float(model.rotary_base),
        rotary_percent=1.0 if is_yarn else model.rotary_percent,
        is_interleaved=True,
        scaling=_yarn(model) if is_yarn else None,
    )


def _yarn(model: ModelConfig) -> YarnScaling:
    assert model.yarn_original_max_position_embeddings is not None, "a rule requires it"
    return YarnScaling(
        factor=model.rotary_scaling_factor,
        original_length=model.yarn_original_max_position_embeddings,
        beta_fast=model.yarn_beta_fast,
        beta_slow=model.yarn_beta_slow,
        mscale=model.mscale,
        mscale_all_dim=model.mscale_all_dim,
        rounds_range=model.yarn_correction_range_round_to_int,
    )
