"""Llama 2 and 3, and the parts that most families share with it."""

from typing import Final

from megatrain.interop.hf.config_parts import QueryGroups
from megatrain.interop.hf.family import (
    POSITIVE,
    PROBABILITY,
    Choice,
    ConfigPart,
    Family,
    Fixed,
    Fused,
    Modules,
    Not,
    Value,
    in_layers,
)
from megatrain.interop.hf.rope import Rope

SIZES: Final[tuple[ConfigPart, ...]] = (
    Value("hidden_size", "model.hidden_size"),
    Value("num_hidden_layers", "model.num_layers"),
    Value("num_attention_heads", "model.num_attention_heads"),
    Value("intermediate_size", "model.ffn_hidden_size"),
    Value("max_position_embeddings", "model.max_position_embeddings"),
    Value("attention_dropout", "model.attention_dropout", PROBABILITY, default=0.0),
)
GATED: Final[tuple[ConfigPart, ...]] = (
    *SIZES,
    Not("tie_word_embeddings", "model.untie_embeddings_and_output_weights", default=False),
    Choice("hidden_act", {"silu": {}}),
    Fixed(
        {
            "model.normalization": "RMSNorm",
            "model.swiglu": True,
            "model.disable_bias_linear": True,
            "model.hidden_dropout": 0.0,
        }
    ),
)
"""Models with RMSNorm, a gated MLP with SiLU and linear layers without biases."""
SWIGLU: Final = (
    *GATED,
    Value("head_dim", "model.kv_channels", is_optional=True),
    Value("rms_norm_eps", "model.norm_epsilon", POSITIVE),
)
NO_ATTENTION_BIAS: Final = Choice("attention_bias", {False: {}}, reason="biases of the attention alone")

OUTER: Final = {
    "model.embed_tokens": "embedding.word_embeddings",
    "model.norm": "decoder.final_norm",
    "lm_head": "output_layer",
}
ATTENTION: Final = {
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.proj",
}
MLP: Final = {
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
NORMS: Final = {
    "input_layernorm": "attention.norm",
    "post_attention_layernorm": "mlp.norm",
}
QK_NORMS: Final = {
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
}
EXPERTS: Final = {
    "mlp.gate": "mlp.router",
    "mlp.experts.{}.gate_proj": "mlp.experts.{}.gate",
    "mlp.experts.{}.up_proj": "mlp.experts.{}.up",
    "mlp.experts.{}.down_proj": "mlp.experts.{}.down",
}
LAYER: Final = {**ATTENTION, **MLP, **NORMS}
BUFFERS: Final = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


def modules(*parts: Modules) -> dict[str, str | Fused]:
    """Return the modules of a model whose layers have these parts."""
    layer = {theirs: ours for part in parts for theirs, ours in part.items()}
    return {**OUTER, **in_layers("model.layers", layer)}


LLAMA: Final = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    config=(
        *SWIGLU,
        QueryGroups(),
        Rope(),
        NO_ATTENTION_BIAS,
        Choice("mlp_bias", {False: {}}, reason="biases of the MLP alone"),
    ),
    modules=modules(LAYER),
    buffers=BUFFERS,
)
