"""Gemma 2: norms before and after the branches, stored as their difference from 1; soft limits; windows in every second layer."""

from typing import Final

from megatrain.interop.hf.config_parts import GemmaScales, QueryGroups, Windows, every_second
from megatrain.interop.hf.families.llama import ATTENTION, MLP, NO_ATTENTION_BIAS, OUTER, SIZES
from megatrain.interop.hf.family import (
    POSITIVE,
    Choice,
    ConfigPart,
    Family,
    Fixed,
    Fused,
    Not,
    Value,
    in_layers,
)
from megatrain.interop.hf.rope import Rope

GEMMA2_LAYER: Final[dict[str, str | Fused]] = {
    **ATTENTION,
    **MLP,
    "input_layernorm": "attention.norm",
    "post_attention_layernorm": "attention.post_norm",
    "pre_feedforward_layernorm": "mlp.norm",
    "post_feedforward_layernorm": "mlp.post_norm",
}

GEMMA: Final[tuple[ConfigPart, ...]] = (
    *SIZES,
    Value("head_dim", "model.kv_channels", default=256),
    Value("rms_norm_eps", "model.norm_epsilon", POSITIVE),
    Not("tie_word_embeddings", "model.untie_embeddings_and_output_weights", default=True),
    Choice("hidden_activation", {"gelu_pytorch_tanh": {}}),
    NO_ATTENTION_BIAS,
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
"""Parts that all versions share."""

GEMMA2: Final = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    config=(
        *GEMMA,
        Choice("use_bidirectional_attention", {None: {}, False: {}}),
        QueryGroups(default=4),
        Rope(),
        GemmaScales(),
        Windows(default=4096, layers=every_second),
        Value("attn_logit_softcapping", "model.attn_logit_softcapping", POSITIVE, 50.0, is_optional=True),
        Value("final_logit_softcapping", "model.final_logit_softcapping", POSITIVE, 30.0, is_optional=True),
    ),
    modules={**OUTER, **in_layers("model.layers", GEMMA2_LAYER)},
)
