"""Gemma 3, text: Gemma 2 with norms of queries and keys, five layers with a window to one without, and RoPE of its own for each kind."""

from typing import Final

from megatrain.interop.hf.config_parts import GemmaScales, QueryGroups, Windows, all_but_every_sixth
from megatrain.interop.hf.families.gemma2 import GEMMA, GEMMA2_LAYER
from megatrain.interop.hf.families.llama import OUTER, QK_NORMS
from megatrain.interop.hf.family import POSITIVE, Choice, Family, Fixed, Implied, Value, in_layers
from megatrain.interop.hf.rope import RopeByLayer

GEMMA3: Final = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    config=(
        *GEMMA,
        QueryGroups(default=4),
        RopeByLayer(),
        GemmaScales(),
        Windows(default=4096, layers=all_but_every_sixth),
        Value("attn_logit_softcapping", "model.attn_logit_softcapping", POSITIVE, is_optional=True),
        Value("final_logit_softcapping", "model.final_logit_softcapping", POSITIVE, is_optional=True),
        Choice("use_bidirectional_attention", {False: {}, None: {}}),
        Implied(("sliding_window_pattern", "_sliding_window_pattern")),
        Fixed({"model.qk_layernorm": True}),
    ),
    modules={**OUTER, **in_layers("model.layers", {**GEMMA2_LAYER, **QK_NORMS})},
)
