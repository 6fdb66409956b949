"""The model as data, from its settings: `derived.model_spec`.

settings ──> layers that flags describe ──> the function of --spec, if it is given ──> ModelSpec
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal, get_args

from megatrain.config.derive.custom_layers import layer_function
from megatrain.config.derive.families import (
    head_of,
    mamba_of,
    max_labels,
    num_layers,
    num_token_types,
    stacks_of,
)
from megatrain.config.derive.hybrid_pattern import SIDE_BY_SIDE, HybridPattern, known_pattern
from megatrain.config.derive.layer_blocks import LINEAR, LayersError, layer_blocks
from megatrain.config.derive.patterns import parse_expert_pattern, parse_layer_pattern, parse_window
from megatrain.config.derive.vision import num_positions, vision_spec
from megatrain.config.model_spec.activation import Activation
from megatrain.config.model_spec.attention import AttentionSpec, IndexerSpec, SparseAttentionSpec
from megatrain.config.model_spec.delta_rule import LinearAttentionSpec
from megatrain.config.model_spec.experts import BalancingLoss, ExpertsSpec, RouterSpec
from megatrain.config.model_spec.latent_attention import LatentSizes
from megatrain.config.model_spec.layer import LayerSpec
from megatrain.config.model_spec.lora import LoraSpec
from megatrain.config.model_spec.mlp import AttentionReplacementSpec, MlpReplacementSpec, MlpSpec
from megatrain.config.model_spec.model import ModelSpec, MtpSpec
from megatrain.config.model_spec.norm import NormSpec
from megatrain.config.model_spec.part import Part
from megatrain.config.model_spec.rotary import LlamaScaling, RotarySpec, YarnScaling
from megatrain.config.plan import DerivedValue, Draft
from megatrain.config.registry import derives
from megatrain.config.schema.adapters import AdaptersConfig
from megatrain.config.schema.experts import ExpertsConfig
from megatrain.config.schema.model import ModelConfig
from megatrain.config.schema.values import UnresolvedError
from megatrain.config.schema.vision import VisionConfig

_SINKS: dict[str, Literal["none", "zero", "learned"]]
_SINKS = {"vanilla": "none", "off-by-one": "zero", "learnable": "learned"}


@derives("derived.model_spec")
def model_spec(draft: Draft) -> DerivedValue:
    """Derive the model. Rules report the errors of settings."""
    model, custom = draft.config.model, draft.facts.custom_layers
    spec = spec_of_flags(draft)
    if layer_function(model.spec) is not None:
        if custom is None:
            raise UnresolvedError  # `data_problems` has the reason.
        for name in vars(model):
            getattr(model, name)  # The function may read each setting: wait for it.
        layers = custom(model, spec.layers)
        return DerivedValue(spec.with_layers(layers), f"by --spec {' '.join(model.spec)}")
    text = model.heterogeneous_layers_config_encoded_json
    where = model.heterogeneous_layers_config_path or "--heterogeneous-layers-config-encoded-json"
    return DerivedValue(spec, "equals --num-layers" if text is None else f"by {where}")


def spec_of_flags(draft: Draft) -> ModelSpec:
    """Return the model without --spec. Raises UnresolvedError for settings that rules report."""
    config, model = draft.config, draft.config.model
    try:
        vocab_size = draft.derived.vocab_size
    except UnresolvedError:  # `vocabulary_is_known` reports it; rules about layers need no vocabulary
        vocab_size, model = 0, model.replaced({"padded_vocab_size": 0})
    if model.model_family == "hybrid" and known_pattern(model.hybrid_layer_pattern) is None:
        raise UnresolvedError
    spec = describe_model(
        model.replaced({"max_position_embeddings": num_positions(config)}),
        config.experts,
        config.vision,
        vocab_size=vocab_size,
        qk_norm_decays=config.optimizer.apply_wd_to_qk_layernorm,
        labels=max_labels(model, config.data),
    )
    return dataclasses.replace(spec, lora=_lora(config.adapters))


def _lora(adapters: AdaptersConfig) -> LoraSpec | None:
    rank = adapters.lora_rank
    if rank is None:
        return None
    return LoraSpec(rank, adapters.lora_alpha, adapters.lora_target_modules, adapters.lora_dropout)


def describe_model(
    model: ModelConfig,
    experts: ExpertsConfig,
    vision: VisionConfig = VisionConfig(),  # noqa: B008 (frozen)
    *,
    vocab_size: int,
    qk_norm_decays: bool = False,
    labels: int | None = None,
) -> ModelSpec:
    """Return the model that resolved settings describe. Raises LayersError and PatternError.

    Args:
        vocab_size: of the tokenizer.
        qk_norm_decays: weights of norms of queries and keys have weight decay.
        labels: see `HeadSpec.max_labels`.
    """
    init_std = matrix_init_std(model)
    pattern = known_pattern(model.hybrid_layer_pattern) if model.model_family == "hybrid" else None
    has_positions = model.position_embedding_type == "learned_absolute"
    embedding_std = model.embedding_init_method_std
    embedding_std = model.init_method_std if embedding_std is None else embedding_std
    layers = _layers(model, experts, pattern, qk_norm_decays=qk_norm_decays)
    norm = NormSpec(
        kind=model.normalization, epsilon=model.norm_epsilon, is_stored_minus_one=model.apply_layernorm_1p
    )
    is_vlm = model.model_family == "vlm"
    return ModelSpec(
        hidden_size=model.hidden_size,
        vocab_size=vocab_size,
        padded_vocab_size=model.padded_vocab_size,
        stacks=stacks_of(model, layers),
        is_tied=not model.untie_embeddings_and_output_weights and not is_vlm,
        init_std=init_std,
        output_init_std=init_std / math.sqrt(model.num_layers * (2 if pattern is None else 1)),
        embedding_init_std=embedding_std,
        head_init_std=embedding_std if model.use_mup else None,
        norm=norm,
        num_positions=model.max_position_embeddings if has_positions else None,
        num_token_types=num_token_types(model),
        head=head_of(model, labels),
        embedding_multiplier=model.embedding_multiplier,
        width_multiplier=model.mup_embedding_mult if model.use_mup else 1.0,
        hidden_dropout=model.hidden_dropout,
        is_residual_fp32=model.fp32_residual_connection,
        logit_scale=output_multiplier(model),
        logit_softcap=model.final_logit_softcapping,
        z_loss_coeff=model.z_loss_coeff,
        mtp=_mtp(model, experts, pattern, qk_norm_decays=qk_norm_decays),
        vision=vision_spec(model, vision, layers[0], norm) if is_vlm else None,
    )


def _mtp(
    model: ModelConfig, experts: ExpertsConfig, pattern: HybridPattern | None, *, qk_norm_decays: bool
) -> MtpSpec | None:
    if not model.mtp_num_layers:
        return None
    head = "" if pattern is None else pattern.head or ""
    layers = _layers_of_letters(head, model, experts, qk_norm_decays=qk_norm_decays)
    return MtpSpec(
        num_depths=model.mtp_num_layers,
        loss_factor=model.mtp_loss_scaling_factor,
        layers=layers,
        is_repeated=model.mtp_use_repeated_layer,
    )


def _layers_of_letters(
    letters: str, model: ModelConfig, experts: ExpertsConfig, *, qk_norm_decays: bool
) -> tuple[LayerSpec, ...]:
    """Return layers by the letters of a pattern of a hybrid."""

    def attention() -> Part:
        return _attention(model, qk_norm_decays=qk_norm_decays)

    parts: dict[str, Callable[[], tuple[Part, ...]]] = {
        "M": lambda: (mamba_of(model),),
        "G": lambda: (_linear_attention(model),),
        "*": lambda: (attention(),),
        "+": lambda: (attention(),),
        "-": lambda: (_mlp(model, model.ffn_hidden_size),),
        "E": lambda: (_experts(model, experts),),
        SIDE_BY_SIDE: lambda: (mamba_of(model), attention()),
    }
    if set(letters) - set(parts) or ("E" in letters and experts.num_experts is None):
        raise UnresolvedError  # `patterns_have_their_parts` reports it
    built = {letter: parts[letter]() for letter in dict.fromkeys(letters)}
    return tuple(
        LayerSpec(
            parts=built[letter],
            norm_position=model.norm_position,
            is_parallel=letter == SIDE_BY_SIDE,
            has_one_norm=letter == SIDE_BY_SIDE,
        )
        for letter in letters
    )


def _layers(
    model: ModelConfig, experts: ExpertsConfig, pattern: HybridPattern | None, *, qk_norm_decays: bool
) -> tuple[LayerSpec, ...]:
    if pattern is not None:
        return _layers_of_letters(pattern.layers, model, experts, qk_norm_decays=qk_norm_decays)
    if model.model_family == "vlm":
        model = model.replaced({"num_layers": num_layers(model)})
    is_linear = (False,) * model.num_layers
    if model.experimental_attention_variant not in (None, "dsa"):
        is_linear = parse_layer_pattern(model.linear_attention_freq, model.num_layers, one_means=True)
    has_experts = (False,) * model.num_layers
    if experts.num_experts is not None:
        has_experts = parse_expert_pattern(experts.moe_layer_freq, model.num_layers)
    has_window = parse_layer_pattern(model.window_attn_skip_freq, model.num_layers, one_means=True)
    has_rotary = parse_layer_pattern(model.no_rope_freq, model.num_layers, one_means=False)
    attention, rotary_of_windows = _attention(model, qk_norm_decays=qk_norm_decays), _rotary_of_windows(model)
    layers = []
    for number, block in enumerate(layer_blocks(model)):
        rotary = rotary_of_windows if has_window[number] else attention.rotary
        mixer: Part = dataclasses.replace(
            attention,
            num_query_groups=block.num_query_groups,
            rotary=rotary if has_rotary[number] else None,
            window=attention.window if has_window[number] else None,
        )
        if is_linear[number]:
            mixer = _linear_attention(model)
        elif block.num_query_groups == LINEAR:
            mixer = AttentionReplacementSpec(has_bias=not model.disable_bias_linear)
        mlp: Part = _mlp(model, block.ffn_hidden_size)
        if has_experts[number]:
            mlp = _experts(model, experts)
        elif block.ffn_hidden_size == LINEAR:
            mlp = MlpReplacementSpec(has_bias=not model.disable_bias_linear)
        parts = ((mixer, block.num_query_groups), (mlp, block.ffn_hidden_size))
        layers.append(
            LayerSpec(
                parts=tuple(part for part, size in parts if size),
                norm_position=model.norm_position,
                is_parallel=model.use_parallel_residual,
            )
        )
    return tuple(layers)


def _attention(model: ModelConfig, *, qk_norm_decays: bool) -> AttentionSpec:
    """Return the attention of a layer with a window, if the model has one, and with RoPE."""
    latent = latent_sizes(model)
    has_bias = not model.disable_bias_linear
    kind: Callable[..., AttentionSpec] = AttentionSpec
    if model.experimental_attention_variant == "dsa" and latent is not None:
        kind = functools.partial(SparseAttentionSpec, indexer=_indexer(model))
    return kind(
        num_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        head_dim=model.kv_channels if latent is None else latent.head_dim,
        latent=latent,
        rotary=_rotary(model),
        window=parse_window(model.window_size),
        scale=attention_scale(model),
        softcap=model.attn_logit_softcapping,
        sink=_SINKS[model.softmax_type],
        dropout=model.attention_dropout,
        qk_norm=_qk_norm(model),
        qk_norm_decays=qk_norm_decays,
        has_output_gate=model.attention_output_gate,
        has_qkv_bias=(has_bias or model.add_qkv_bias) and latent is None,
        has_bias=has_bias,
    )


def _indexer(model: ModelConfig) -> IndexerSpec:
    epsilon = model.dsa_indexer_k_norm_epsilon
    return IndexerSpec(
        num_heads=model.dsa_indexer_n_heads,
        head_dim=model.dsa_indexer_head_dim,
        top_k=model.dsa_indexer_topk,
        norm_epsilon=model.norm_epsilon if epsilon is None else epsilon,
        loss_coeff=model.dsa_indexer_loss_coeff,
        has_sparse_loss=model.dsa_indexer_use_sparse_loss,
        is_interleaved=model.dsa_indexer_rope_interleaved,
        has_relu=model.dsa_indexer_scoring_relu,
    )


def latent_sizes(model: ModelConfig) -> LatentSizes | None:
    """Return the sizes of multi-latent attention; None: the model does not have it."""
    if not model.multi_latent_attention:
        return None
    return LatentSizes(
        query_rank=model.q_lora_rank,
        kv_rank=model.kv_lora_rank,
        qk_nope_head_dim=model.qk_head_dim,
        qk_rope_head_dim=model.qk_pos_emb_head_dim,
        v_head_dim=model.v_head_dim,
        norm_epsilon=model.latent_norm_epsilon or model.norm_epsilon,
    )


def attention_scale(model: ModelConfig) -> float | None:
    """Return the factor of attention scores. None: 1 / sqrt(kv channels)."""
    if model.multi_latent_attention and model.softmax_scale is None:
        channels = float(model.qk_head_dim + model.qk_pos_emb_head_dim)
        return float(yarn_temperature(model) ** 2 / channels**0.5)
    if model.softmax_scale is not None or not model.use_mup:
        return model.softmax_scale
    root = 1.0 if model.mup_base_head_dim is None else model.mup_base_head_dim**0.5
    return float(root / model.kv_channels**model.mup_attn_scale_power)


def yarn_temperature(model: ModelConfig) -> float:
    """Return the factor of queries and of keys that multi-latent attention applies in its scores (DeepSeek-V2), in every channel."""
    factor = model.rotary_scaling_factor
    return 0.1 * model.mscale_all_dim * math.log(factor) + 1.0 if factor > 1 else 1.0


def _linear_attention(model: ModelConfig) -> LinearAttentionSpec:
    """Its GELU is exact, as in Megatron-LM, also where that of the MLP is not."""
    kind = activation_of(model)[0]
    return LinearAttentionSpec(
        num_key_heads=model.linear_num_key_heads,
        num_value_heads=model.linear_num_value_heads,
        key_head_dim=model.linear_key_head_dim,
        value_head_dim=model.linear_value_head_dim,
        kernel_size=model.linear_conv_kernel_dim,
        has_channel_gates=model.experimental_attention_variant == "gdn2",
        activation="gelu" if kind == "gelu_tanh" else kind,
    )


def _mlp(model: ModelConfig, width: int) -> MlpSpec:
    return MlpSpec(
        ffn_hidden_size=width,
        activation=activation_of(model)[0],
        clamp=model.activation_func_clamp_value,
        offset=model.glu_linear_offset,
        has_bias=not model.disable_bias_linear,
    )


def activation_of(model: ModelConfig) -> tuple[Activation, str]:
    """Return the activation of the MLP, and the reason."""
    if given := given_activations(model):
        return given[0]
    if model.disable_bias_linear:
        return "gelu", "exact, as in Megatron-LM without biases (--disable-bias-linear)"
    if model.no_bias_gelu_fusion:
        return "gelu", "exact, as in Megatron-LM with --no-bias-gelu-fusion"
    return "gelu_tanh", "GELU by tanh, as in Megatron-LM's fusion of bias and GELU"


def given_activations(model: ModelConfig) -> list[tuple[Activation, str]]:
    """Return the activations that flags select, each with its flag."""
    flags: dict[tuple[Activation, str], bool] = {
        ("swiglu", "--swiglu"): model.swiglu,
        ("geglu_tanh", "--geglu"): model.geglu,
        ("quick_geglu", "--quick-geglu"): model.quick_geglu,
        ("squared_relu", "--squared-relu"): model.squared_relu,
    }
    return [one for one, is_given in flags.items() if is_given]


def _experts(model: ModelConfig, experts: ExpertsConfig) -> ExpertsSpec:
    if experts.moe_ffn_hidden_size is None:
        raise LayersError("--moe-ffn-hidden-size is none")
    shared = experts.moe_shared_expert_intermediate_size
    return ExpertsSpec(
        router=_router(experts, has_bias=not model.disable_bias_linear),
        expert=_mlp(model, experts.moe_ffn_hidden_size),
        shared=_mlp(model, shared) if shared else None,
        has_shared_gate=experts.moe_shared_expert_gate,
        latent_size=experts.moe_latent_size or None,
    )


def _router(experts: ExpertsConfig, *, has_bias: bool) -> RouterSpec:
    assert experts.num_experts is not None
    kinds, best = experts.moe_router_load_balancing_type, experts.moe_router_group_topk
    if len(kinds) != len(experts.moe_aux_loss_coeff):
        raise LayersError(
            "--moe-aux-loss-coeff has another number of values than --moe-router-load-balancing-type"
        )
    factors = dict(zip(kinds, experts.moe_aux_loss_coeff, strict=True))
    is_padded = experts.moe_pad_expert_input_to_capacity and experts.moe_expert_capacity_factor is not None
    return RouterSpec(
        num_experts=experts.num_experts,
        top_k=experts.moe_router_topk,
        score_function=experts.moe_router_score_function,
        is_pre_softmax=experts.moe_router_pre_softmax and experts.moe_router_score_function == "softmax",
        num_groups=experts.moe_router_num_groups,
        group_top_k=best,
        group_score_top_k=best and (experts.moe_router_group_score_topk or experts.moe_router_topk // best),
        scaling_factor=experts.moe_router_topk_scaling_factor or 1.0,
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


def _qk_norm(model: ModelConfig) -> Literal["none", "head", "l2", "all_heads", "latent"]:
    if model.qk_l2_norm:
        return "l2"
    width = "latent" if model.multi_latent_attention else model.qk_layernorm_width
    return width if model.qk_layernorm else "none"


def matrix_init_std(model: ModelConfig) -> float:
    """Return the standard deviation of initial matrices before scaling by depth."""
    if not model.use_mup or model.mup_width_mult == 1:
        return model.init_method_std
    return float(model.init_method_std / model.mup_width_mult**0.5)


def output_multiplier(model: ModelConfig) -> float:
    """Return the factor of the logits."""
    if not model.use_mup:
        return 1.0
    return 1.0 / model.mup_width_mult if model.mup_output_mult == 1 else model.mup_output_mult


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


def _rotary_of_windows(model: ModelConfig) -> RotarySpec | None:
    rotary = _rotary(model)
    if rotary is None or model.window_rotary_base is None or parse_window(model.window_size) is None:
        return rotary
    return dataclasses.replace(rotary, base=model.window_rotary_base, interpolation=1.0, scaling=None)


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
    if model.yarn_original_max_position_embeddings is None:
        raise LayersError("--yarn-original-max-position-embeddings is none")
    return YarnScaling(
        factor=model.rotary_scaling_factor,
        original_length=model.yarn_original_max_position_embeddings,
        beta_fast=model.yarn_beta_fast,
        beta_slow=model.yarn_beta_slow,
        mscale=model.mscale,
        mscale_all_dim=model.mscale_all_dim,
        rounds_range=model.yarn_correction_range_round_to_int,
    )
