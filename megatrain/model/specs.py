"""Layer specs: for each layer of the model, which parts make it, as data.

    LayerSpec = mixer (attention) + mlp or experts, each on a branch of the residual stream:

    pre   x + f(norm x)        post   x + norm(f x)        both   x + norm(f(norm x))

What a spec does not say (dtype, ranks, kernels) is the implementation's business.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from megatrain.config.derive.layer_sizes import ExpertSizes, LayerSizes, layer_table
from megatrain.config.derive.model import activation_of, attention_scale, matrix_init_std
from megatrain.config.derive.patterns import parse_layer_pattern, parse_window
from megatrain.config.plan import Activation
from megatrain.config.schema.experts import ExpertsConfig
from megatrain.config.schema.model import ModelConfig
from megatrain.kernels.activations import ActivationFunction
from megatrain.kernels.rotary import LlamaScaling, RotarySpec, YarnScaling

NormPosition = Literal["pre", "post", "both"]


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """The norms of a model, but for those of queries and keys all alike."""

    kind: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    epsilon: float = 1e-5
    is_stored_minus_one: bool = False
    """Whether weights are kept as their distance from 1."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Causal self-attention with grouped queries."""

    num_heads: int
    num_query_groups: int
    head_channels: int
    rotary: RotarySpec | None = None
    """None: queries and keys do not know their places."""
    window: int | None = None
    """How many earlier tokens a query sees; None: all."""
    scale: float | None = None
    """Of the scores; None: 1 / sqrt(head channels)."""
    softcap: float | None = None
    """Scores stay within this, by tanh."""
    sink: Literal["none", "zero", "learned"] = "none"
    """A score that every query sees besides those of the keys, and that leads nowhere."""
    dropout: float = 0.0
    """Share of the probabilities that training drops."""
    qk_norm: Literal["none", "head", "all_heads"] = "none"
    """Whether queries and keys are normed, and over which channels."""
    does_qk_norm_decay: bool = False
    """Whether weight decay applies to those norms."""
    has_qkv_bias: bool = False
    has_bias: bool = False
    """Of the projection back to the residual stream."""


@dataclass(frozen=True, kw_only=True)
class MlpSpec:
    """Feed-forward layer: down(act(up x)), or gated: down(act(gate x) * up x)."""

    ffn_hidden_size: int
    activation: Activation = "swiglu"
    """Activation of the MLP: gate and function."""
    activation_fn: ActivationFunction | None = None
    """Custom activation function that replaces the one of `activation`."""
    clamp: float | None = None
    """Largest gate, and largest size of what it gates."""
    offset: float = 0.0
    """Added to what is gated."""
    has_bias: bool = False

    @property
    def is_gated(self) -> bool:
        return self.activation in ("swiglu", "geglu_tanh", "quick_geglu")

    @property
    def fc1_names(self) -> list[str]:
        """Canonical names of the tensors that the first linear layer fuses."""
        return ["gate", "up"] if self.is_gated else ["up"]


BalancingLoss = Literal["aux_loss", "seq_aux_loss", "global_aux_loss"]
"""Over which tokens a loss keeps the loads of experts even: a micro-batch's, a sequence's, a global batch's."""


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """Picks some experts for each token, and says with what weights their outputs are summed."""

    num_experts: int
    top_k: int
    score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    is_pre_softmax: bool = False
    """Whether the softmax is over all experts, and not over the best alone."""
    num_groups: int | None = None
    """Groups of neighbours, of which a token goes to `group_top_k`; None: there are none."""
    group_top_k: int | None = None
    scaling_factor: float | None = None
    """Of the weights."""
    dtype: Literal["fp32", "fp64"] | None = None
    """Of logits and scores; None: logits in that of the model."""
    losses: tuple[tuple[BalancingLoss, float], ...] = ()
    """What keeps loads even, each with its factor."""
    is_sinkhorn: bool = False
    """Whether experts are picked by scores that Sinkhorn's iteration has evened out."""
    z_loss_coeff: float = 0.0
    has_expert_bias: bool = False
    """Whether scores get a bias for each expert when experts are picked."""
    bias_update_rate: float = 1e-3
    jitter: float = 0.0
    capacity_factor: float | None = None
    """Largest load of an expert over the even one; None: nothing is dropped."""
    drops_last: bool = False
    """Whether it is the last tokens that are dropped, and not those of the lowest scores."""
    is_padded: bool = False
    """Whether every expert computes as many rows as it has capacity."""
    is_forced: bool = False
    """Whether experts are picked at random, to measure speed with even loads."""


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """Experts in place of an MLP: each token goes to some of them."""

    router: RouterSpec
    expert: MlpSpec
    """Each of them."""
    shared: MlpSpec | None = None
    """An MLP beside them that sees all tokens."""
    has_shared_gate: bool = False
    """Whether what that gives is multiplied with a sigmoid of the token."""


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer."""

    mixer: AttentionSpec | None
    """None: the layer has no attention."""
    mlp: MlpSpec | ExpertsSpec | None
    """None: the layer has no MLP."""
    norm_position: NormPosition = "pre"


@dataclass(frozen=True, kw_only=True)
class GptSpec:
    """A whole model: what every rank agrees on before any rank builds its part."""

    hidden_size: int
    vocab_size: int
    """Of the tokenizer."""
    padded_vocab_size: int
    layers: tuple[LayerSpec, ...]
    is_tied: bool
    """Whether the head uses the embedding's weights."""
    init_std: float
    output_init_std: float
    """For the layers that write into the residual stream."""
    embedding_init_std: float | None = None
    """For the embedding; None: as for other layers."""
    head_init_std: float | None = None
    """For an output layer of its own; None: as for other layers."""
    norm: NormSpec = field(default_factory=NormSpec)
    num_positions: int | None = None
    """Rows of the table of learned positions; None: there is none."""
    embedding_multiplier: float = 1.0
    """Of the embedding's output; rounded to its dtype first, as Gemma does."""
    width_multiplier: float = 1.0
    """Another one, as it is (muP)."""
    hidden_dropout: float = 0.0
    """Share of what the branches and the embedding add to the residual stream that training drops."""
    is_residual_fp32: bool = False
    """Whether the residual stream is fp32 whatever the weights are."""
    logit_scale: float = 1.0
    """Factor of the logits."""
    logit_softcap: float | None = None
    """Logits stay within this, by tanh."""
    z_loss_coeff: float = 0.0
    """Of the square of each token's log sum of exponentials, which is added to its loss."""

    @property
    def routers(self) -> dict[int, RouterSpec]:
        """Of the layers with experts, by their numbers."""
        return {
            number: layer.mlp.router
            for number, layer in enumerate(self.layers)
            if isinstance(layer.mlp, ExpertsSpec)
        }


def gpt_spec(
    model: ModelConfig, experts: ExpertsConfig, *, vocab_size: int, does_qk_norm_decay: bool = False
) -> GptSpec:
    """The spec that a resolved configuration describes."""
    init_std = matrix_init_std(model)[0]
    embedding_std = model.embedding_init_method_std
    embedding_std = model.init_method_std if embedding_std is None else embedding_std
    layers = _layers(model, experts, attention_scale(model)[0], does_qk_norm_decay)
    return GptSpec(
        hidden_size=model.hidden_size,
        vocab_size=vocab_size,
        padded_vocab_size=model.padded_vocab_size,
        layers=layers,
        is_tied=not model.untie_embeddings_and_output_weights,
        init_std=init_std,
        output_init_std=init_std / math.sqrt(2 * model.num_layers),
        embedding_init_std=embedding_std,
        head_init_std=embedding_std if model.use_mup else None,
        norm=NormSpec(
            kind=model.normalization, epsilon=model.norm_epsilon, is_stored_minus_one=model.apply_layernorm_1p
        ),
        num_positions=model.max_position_embeddings
        if model.position_embedding_type == "learned_absolute"
        else None,
        embedding_multiplier=model.embedding_multiplier,
        width_multiplier=model.mup_embedding_mult if model.use_mup else 1.0,
        hidden_dropout=model.hidden_dropout,
        is_residual_fp32=model.fp32_residual_connection,
        logit_scale=model.mup_output_mult if model.use_mup else 1.0,
        logit_softcap=model.final_logit_softcapping,
        z_loss_coeff=model.z_loss_coeff,
    )


def _layers(
    model: ModelConfig, experts: ExpertsConfig, scale: float | None, does_qk_norm_decay: bool
) -> tuple[LayerSpec, ...]:
    has_window = parse_layer_pattern(model.window_attn_skip_freq, model.num_layers, one_means=True)
    has_rotary = parse_layer_pattern(model.no_rope_freq, model.num_layers, one_means=False)
    left = parse_window(model.window_size)
    rotary = _rotary(model)
    has_bias = not model.disable_bias_linear
    layers = []
    for number, sizes in enumerate(layer_table(model, experts).layers):
        attention = AttentionSpec(
            num_heads=sizes.num_heads,
            num_query_groups=sizes.num_query_groups,
            head_channels=sizes.head_channels,
            rotary=rotary if has_rotary[number] else None,
            window=left if has_window[number] else None,
            scale=scale,
            softcap=model.attn_logit_softcapping,
            sink=_SINKS[model.softmax_type],
            dropout=model.attention_dropout,
            qk_norm=model.qk_layernorm_width if model.qk_layernorm else "none",
            does_qk_norm_decay=does_qk_norm_decay,
            has_qkv_bias=has_bias or model.add_qkv_bias,
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
                mixer=attention if sizes.num_heads else None,
                mlp=_mlp(mlp, sizes, experts),
                norm_position=model.norm_position,
            )
        )
    return tuple(layers)


def _mlp(dense: MlpSpec, sizes: LayerSizes, experts: ExpertsConfig) -> MlpSpec | ExpertsSpec | None:
    """What a layer of these sizes has; `dense`: the MLP that all have in common but for its width."""
    if sizes.experts is None:
        return dense if sizes.ffn_hidden_size else None
    width = sizes.experts.shared_ffn_hidden_size
    return ExpertsSpec(
        router=_router(experts, sizes.experts),
        expert=dataclasses.replace(dense, ffn_hidden_size=sizes.experts.ffn_hidden_size),
        shared=dataclasses.replace(dense, ffn_hidden_size=width) if width else None,
        has_shared_gate=experts.moe_shared_expert_gate,
    )


def _router(experts: ExpertsConfig, sizes: ExpertSizes) -> RouterSpec:
    kinds = experts.moe_router_load_balancing_type
    factors = dict(zip(kinds, experts.moe_aux_loss_coeff, strict=True))
    return RouterSpec(
        num_experts=sizes.num_experts,
        top_k=sizes.top_k,
        score_function=experts.moe_router_score_function,
        is_pre_softmax=experts.moe_router_pre_softmax,
        num_groups=experts.moe_router_num_groups,
        group_top_k=experts.moe_router_group_topk,
        scaling_factor=experts.moe_router_topk_scaling_factor,
        dtype=experts.moe_router_dtype,
        losses=tuple((loss, factors[loss]) for loss in get_args(BalancingLoss) if factors.get(loss)),
        is_sinkhorn="sinkhorn" in kinds,
        z_loss_coeff=experts.moe_z_loss_coeff or 0.0,
        has_expert_bias=experts.moe_router_enable_expert_bias,
        bias_update_rate=experts.moe_router_bias_update_rate,
        jitter=experts.moe_input_jitter_eps or 0.0,
        capacity_factor=experts.moe_expert_capacity_factor,
        drops_last=experts.moe_token_drop_policy == "position",  # noqa: S105 (no password)
        is_padded=experts.moe_pad_expert_input_to_capacity,
        is_forced=experts.moe_router_force_load_balancing,
    )


_SINKS: dict[str, Literal["none", "zero", "learned"]] = {
    "vanilla": "none",
    "off-by-one": "zero",
    "learnable": "learned",
}


def _rotary(model: ModelConfig) -> RotarySpec | None:
    if model.position_embedding_type not in ("rope", "yarn"):
        return None
    scaling: LlamaScaling | YarnScaling | None = None
    if model.position_embedding_type == "yarn":
        assert model.yarn_original_max_position_embeddings is not None, "a rule asks for it"
        scaling = YarnScaling(
            factor=model.rotary_scaling_factor,
            original_length=model.yarn_original_max_position_embeddings,
            beta_fast=model.yarn_beta_fast,
            beta_slow=model.yarn_beta_slow,
            mscale=model.mscale,
            mscale_all_dim=model.mscale_all_dim,
            rounds_range=model.yarn_correction_range_round_to_int,
        )
    elif model.use_rope_scaling:
        scaling = LlamaScaling(factor=model.rope_scaling_factor)
    return RotarySpec(
        base=float(model.rotary_base),
        rotary_percent=model.rotary_percent,
        is_interleaved=model.rotary_interleaved,
        interpolation=float(model.rotary_seq_len_interpolation_factor or 1),
        scaling=scaling,
    )
