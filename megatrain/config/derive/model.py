"""Derived values of the model: sizes, vocabulary, muP, FLOPs, recomputed norms.

Maximal update parametrization (muP) with m = hidden size / base hidden size, as in Megatron-LM (core 0.20.0):

                       initial values   Adam             SGD       forward
    matrices           std / sqrt(m)    lr / m, eps / m  lr
    vectors, tables    std              lr               lr * m    embedding output * embedding multiplier
    untied output      std              lr / m, eps / m  lr        logits * output multiplier, 1 / m
    attention                                                      scores * sqrt(base head channels) / channels ** power

A --decoupled-lr is not scaled. Source: Yang et al., arXiv:2203.03466, table 8, which has lr instead of lr / m for an
untied output layer with Adam.
"""

import math
from collections.abc import Callable
from typing import Final

from megatrain.config.derive.custom_layers import is_plain_gpt_layer
from megatrain.config.derive.layer_blocks import condensed
from megatrain.config.model_spec.activation import Activation
from megatrain.config.model_spec.latent_attention import LatentSizes
from megatrain.config.plan import DerivedValue, Draft
from megatrain.config.schema.model import ModelConfig
from megatrain.config.schema.tree import flag_of
from megatrain.config.schema.values import UnresolvedError, whole
from megatrain.config.user_function import user_function

_WITHOUT_MUP: Final = "--use-mup is off"
_MAX_NORMS_PERCENT: Final = 0.5
"""Largest part of a step that recomputed norms may take by default."""
_FLOPS_PER_BYTE: Final = 600 / 4
"""Matrix FLOPs of a Hopper GPU in the time of moving a byte, both at the rates of training (docs/benchmarks.md)."""


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
    )


def kv_channels(draft: Draft) -> DerivedValue:
    model = draft.config.model
    latent = latent_sizes(model)
    if latent is not None:
        return DerivedValue(
            latent.head_dim,
            f"queries and keys of --multi-latent-attention: {model.qk_head_dim} + {model.qk_pos_emb_head_dim}",
        )
    width = whole(model.hidden_size, model.num_attention_heads)
    return DerivedValue(width, f"hidden size {model.hidden_size} / {model.num_attention_heads} heads")


def kv_channels_of_latents(draft: Draft) -> DerivedValue | None:
    """Override --kv-channels with multi-latent attention, which has channels of its own, as in Megatron-LM."""
    given, latent = draft.config.model.kv_channels, latent_sizes(draft.config.model)
    if latent is None or given == latent.head_dim:
        return None
    return DerivedValue(
        latent.head_dim,
        f"--kv-channels {given} has no effect with --multi-latent-attention, whose keys have {latent.head_dim} channels",
    )


def ffn_hidden_size(draft: Draft) -> DerivedValue:
    model = draft.config.model
    if model.swiglu or model.geglu:
        width = int(4 * model.hidden_size * 2 / 3 / 64) * 64
        return DerivedValue(
            width, f"4 * hidden size {model.hidden_size} * 2/3, down to a multiple of 64 (gated)"
        )
    return DerivedValue(4 * model.hidden_size, f"4 * hidden size {model.hidden_size}")


def moe_ffn_hidden_size(draft: Draft) -> DerivedValue:
    if draft.config.experts.num_experts is None:
        return DerivedValue(None, "--num-experts is not given")
    return DerivedValue(draft.config.model.ffn_hidden_size, "equals --ffn-hidden-size")


def activation_of(model: ModelConfig) -> tuple[Activation, str]:
    """Return the activation of the MLP, and the reason."""
    if model.swiglu:
        return "swiglu", "--swiglu"
    if model.geglu:
        return "geglu_tanh", "--geglu: GELU by tanh"
    if model.quick_geglu:
        return "quick_geglu", "--quick-geglu"
    if model.squared_relu:
        return "squared_relu", "--squared-relu"
    if model.disable_bias_linear:
        return "gelu", "exact, as in Megatron-LM without biases (--disable-bias-linear)"
    if model.no_bias_gelu_fusion:
        return "gelu", "exact, as in Megatron-LM with --no-bias-gelu-fusion"
    return "gelu_tanh", "GELU by tanh, as in Megatron-LM's fusion of bias and GELU"


def num_query_groups(draft: Draft) -> DerivedValue:
    model = draft.config.model
    if model.group_query_attention:
        raise UnresolvedError  # The rule `query_groups_are_given` asks for it.
    return DerivedValue(model.num_attention_heads, f"one for each of {model.num_attention_heads} heads")


def rope_type(draft: Draft) -> DerivedValue:
    if draft.config.model.multi_latent_attention:
        return DerivedValue("yarn", "Megatron-LM's default with --multi-latent-attention")
    return DerivedValue("rope", "--multi-latent-attention is not given")


def yarn_original_max_position_embeddings(draft: Draft) -> DerivedValue:
    model = draft.config.model
    if model.multi_latent_attention and model.rope_type == "yarn":
        return DerivedValue(4096, "Megatron-LM's value for --rope-type yarn")
    return DerivedValue(None, "--rope-type is not yarn")


def heterogeneous_layers_config_encoded_json(draft: Draft) -> DerivedValue:
    path, text = draft.config.model.heterogeneous_layers_config_path, draft.facts.layers_config
    if path is None:
        return DerivedValue(None, "--heterogeneous-layers-config-path is not given")
    if text is None:
        raise UnresolvedError  # `data_problems` has the reason.
    return DerivedValue(condensed(text), f"read from {path}")


def digest_of(setting: str) -> Callable[[Draft], DerivedValue]:
    """Return the derivation of the digest of the file that one of `USER_FUNCTIONS` names."""

    def derive(draft: Draft) -> DerivedValue:
        function = user_function(draft.config, setting)
        if function is None:
            return DerivedValue(None, f"{flag_of(setting)} names no file")
        if setting not in draft.facts.digests:
            raise UnresolvedError  # `data_problems` has the reason.
        return DerivedValue(draft.facts.digests[setting], f"of {function}")

    return derive


def kv_copies(draft: Draft) -> DerivedValue:
    tp = draft.config.parallel.tensor_model_parallel_size
    mixers = [layer.attention for layer in draft.derived.model_spec.layers]
    counts = [mixer.num_query_groups for mixer in mixers if mixer is not None]
    if not counts or tp <= min(counts):
        groups = min(counts, default=draft.config.model.num_query_groups)
        return DerivedValue(1, f"{groups} key and value heads for {tp} tensor-parallel ranks")
    groups = min(counts)
    return DerivedValue(whole(tp, groups), f"{tp} tensor-parallel ranks for {groups} key and value heads")


def mup_base_hidden_size(draft: Draft) -> DerivedValue:
    model = draft.config.model
    if not model.use_mup:
        return DerivedValue(None, _WITHOUT_MUP)
    return DerivedValue(model.hidden_size, "this model's own hidden size")


def mup_width_mult(draft: Draft) -> DerivedValue:
    width, base = draft.config.model.hidden_size, draft.config.model.mup_base_hidden_size
    if not draft.config.model.use_mup or base is None:
        return DerivedValue(1.0, _WITHOUT_MUP)
    return DerivedValue(width / base, f"hidden size {width} / base hidden size {base}")


def mup_output_mult(draft: Draft) -> DerivedValue:
    model = draft.config.model
    if not model.use_mup:
        return DerivedValue(1.0, _WITHOUT_MUP)
    return DerivedValue(1.0 / model.mup_width_mult, f"1 / width multiplier {model.mup_width_mult:g}")


def mup_output_mult_of_one(draft: Draft) -> DerivedValue | None:
    """Override --mup-output-mult 1, which Megatron-LM treats as its default."""
    given = output_multiplier(draft.config.model)
    if not draft.config.model.use_mup or given == draft.config.model.mup_output_mult:
        return None
    return DerivedValue(
        given,
        f"--mup-output-mult 1 with --use-mup means 1 / width multiplier, as in Megatron-LM: {given:g}",
    )


def output_multiplier(model: ModelConfig) -> float:
    """Return the factor of the logits."""
    if not model.use_mup:
        return 1.0
    return 1.0 / model.mup_width_mult if model.mup_output_mult == 1 else model.mup_output_mult


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


def matrix_init_std(model: ModelConfig) -> float:
    """Return the standard deviation of initial matrices before scaling by depth."""
    if not model.use_mup or model.mup_width_mult == 1:
        return model.init_method_std
    return float(model.init_method_std / model.mup_width_mult**0.5)


def vocab_size(draft: Draft) -> DerivedValue:
    given, found = draft.config.tokenizer.vocab_size, draft.facts.vocab_size
    if found is not None:
        return DerivedValue(found, "the tokenizer's")
    if given is None:
        raise UnresolvedError  # The rule `vocabulary_is_known` reports it.
    return DerivedValue(given, "--vocab-size")


def eod_id(draft: Draft) -> DerivedValue:
    if draft.facts.vocab_size is not None or draft.facts.eod_id is not None:
        reason = "the tokenizer has none" if draft.facts.eod_id is None else "the tokenizer's"
        return DerivedValue(draft.facts.eod_id, reason)
    given = draft.config.tokenizer.null_tokenizer_eod_id
    if given is not None:
        return DerivedValue(given, "--null-tokenizer-eod-id")
    return DerivedValue(draft.derived.vocab_size - 1, "the last token, as there is no tokenizer file")


def padded_vocab_size(draft: Draft) -> DerivedValue:
    vocabulary, tp = draft.derived.vocab_size, draft.config.parallel.tensor_model_parallel_size
    multiple = draft.config.model.make_vocab_size_divisible_by
    rows = padded_vocabulary(vocabulary, divisible_by=multiple, tp_size=tp)
    return DerivedValue(rows, f"{vocabulary} up to a multiple of {multiple} * tp {tp}")


def padded_vocabulary(vocab_size: int, *, divisible_by: int, tp_size: int) -> int:
    """Return the rows of the embedding: each tensor-parallel rank holds a multiple of `divisible_by`."""
    multiple = divisible_by * tp_size
    return -(-vocab_size // multiple) * multiple


def flops_per_iteration(draft: Draft) -> DerivedValue:
    tokens = draft.derived.tokens_per_iteration
    operations = draft.derived.model_spec.training_flops(
        num_tokens=tokens, sum_of_squared_lengths=tokens * draft.config.data.seq_length
    )
    return DerivedValue(
        operations, f"{operations / tokens:.4g} for each of {tokens} tokens, recomputation not counted"
    )


def recompute_norms(draft: Draft) -> DerivedValue:
    training, model = draft.config.training, draft.config.model
    if training.device != "cuda":
        return DerivedValue(False, "not on a GPU")
    if draft.derived.transformer_impl != "local":
        return DerivedValue(False, "Transformer Engine keeps the outputs of its norms")
    if model.norm_position == "post":
        return DerivedValue(False, "no norm precedes a linear layer")
    if training.recompute_granularity is not None or training.recompute_activations:
        return DerivedValue(False, "something else is recomputed")
    if draft.derived.fp8_layers:
        return DerivedValue(False, "FP8 layers save one byte per element of the outputs of norms")
    percent = percent_of_norms(model.hidden_size)
    cost = f"about {percent:.1f} % of a step at --hidden-size {model.hidden_size}"
    if percent > _MAX_NORMS_PERCENT:
        return DerivedValue(False, f"that would take {cost}")
    return DerivedValue(True, f"it takes {cost} and saves the outputs of two norms per layer")


def selective_for_experts(draft: Draft) -> DerivedValue | None:
    """Override the granularity, as --moe-layer-recompute does in Megatron-LM."""
    training = draft.config.training
    if not training.moe_layer_recompute or training.recompute_granularity is not None:
        return None
    return DerivedValue("selective", "--moe-layer-recompute is --recompute-granularity selective")


def modules_with_experts(draft: Draft) -> DerivedValue | None:
    """Override the recomputed modules, as --moe-layer-recompute does in Megatron-LM."""
    training = draft.config.training
    if not training.moe_layer_recompute or "moe" in training.recompute_modules:
        return None
    modules = (*(training.recompute_modules or ("core_attn",)), "moe")
    return DerivedValue(modules, f"--moe-layer-recompute is --recompute-modules {' '.join(modules)}")


def percent_of_norms(hidden_size: int) -> float:
    """Return the time of two more norms in percent of a layer's: 8 h bytes per token, against 6 FLOPs for each of 12 h^2 weights."""
    return 100 * 8 * hidden_size * _FLOPS_PER_BYTE / (72 * hidden_size**2)


def plain_gpt_layers(draft: Draft) -> DerivedValue | None:
    """Override a --spec that names one of Megatron-LM's plain GPT layers: flags describe these here."""
    words = draft.config.model.spec
    if not is_plain_gpt_layer(words):
        return None
    return DerivedValue(
        (),
        f"--spec {' '.join(words)}: flags such as --normalization and --swiglu describe the GPT layer, and"
        " --transformer-impl names its implementation",
    )
