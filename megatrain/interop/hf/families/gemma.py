"""Gemma 2: norms before and after the branches, stored as their difference from 1; soft limits; windows in every second layer.

Gemma 3, text: norms of queries and keys, five layers with a window to one without, and a RoPE of its own for each kind.
"""

from typing import Final

from megatrain.interop.hf.config_parts import (
    GemmaScales,
    QueryGroups,
    Windows,
    all_but_every_sixth,
    every_second,
)
from megatrain.interop.hf.families.llama import ATTENTION, MLP, NO_ATTENTION_BIAS, QK_NORMS, SIZES, modules
from megatrain.interop.hf.family import POSITIVE, Choice, Family, Fixed, Implied, Not, Value
from megatrain.interop.hf.rope import Rope, RopeByLayer

_NORMS: Final = {
    "input_layernorm": "attention.norm",
    "post_attention_layernorm": "attention.post_norm",
    "pre_feedforward_layernorm": "mlp.norm",
    "post_feedforward_layernorm": "mlp.post_norm",
}
_COMMON: Final = (
    *SIZES,
    Value("head_dim", "model.kv_channels", default=256),
    Value("rms_norm_eps", "model.norm_epsilon", POSITIVE),
    Not("tie_word_embeddings", "model.untie_embeddings_and_output_weights", default=True),
    Choice("hidden_activation", {"gelu_pytorch_tanh": {}}),
    NO_ATTENTION_BIAS,
    QueryGroups(default=4),
    GemmaScales(),
    Fixed(
        {
            "model.normalization": "RMSNorm",
            "model.apply_layernorm_1p": True,
            "model.norm_position": "both",
            "model.geglu": True,
            "model.disable_bias_linear": True,
            "model.hidden_dropout": 0.0,
        }
    ),
)

GEMMA2: Final = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    config=(
        *_COMMON,
        Choice("use_bidirectional_attention", {None: {}, False: {}}),
        Rope(),
        Windows(default=4096, layers=every_second),
        Value("attn_logit_softcapping", "model.attn_logit_softcapping", POSITIVE, 50.0, is_optional=True),
        Value("final_logit_softcapping", "model.final_logit_softcapping", POSITIVE, 30.0, is_optional=True),
    ),
    modules=modules(ATTENTION, MLP, _NORMS),
)
GEMMA3: Final = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    config=(
        *_COMMON,
        Choice("use_bidirectional_attention", {False: {}, None: {}}),
        RopeByLayer(),
        Windows(default=4096, layers=all_but_every_sixth),
        Value("attn_logit_softcapping", "model.attn_logit_softcapping", POSITIVE, is_optional=True),
        Value("final_logit_softcapping", "model.final_logit_softcapping", POSITIVE, is_optional=True),
        Implied(("sliding_window_pattern", "_sliding_window_pattern")),
        Fixed({"model.qk_layernorm": True}),
    ),
    modules=modules(ATTENTION, MLP, _NORMS, QK_NORMS),
)
