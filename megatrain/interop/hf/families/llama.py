"""Llama 2 and 3, the parts that most families share with it, and families that differ little: Phi-3, Mistral, OLMo."""

from typing import Final

from megatrain.interop.hf.config_parts import QueryGroups, Windows
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
NO_MLP_BIAS: Final = Choice("mlp_bias", {False: {}}, reason="biases of the MLP alone")

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
        NO_MLP_BIAS,
    ),
    modules=modules(LAYER),
    buffers=BUFFERS,
)


_PHI3_LAYER: Final[Modules] = {
    "self_attn.qkv_proj": Fused(("attention.q", "attention.k", "attention.v")),
    "self_attn.o_proj": "attention.proj",
    "mlp.gate_up_proj": Fused(("mlp.gate", "mlp.up")),
    "mlp.down_proj": "mlp.down",
}

PHI3: Final = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    config=(
        *SWIGLU,
        QueryGroups(),
        Rope(partial="partial_rotary_factor", types=("default",)),
        Windows(),
    ),
    modules=modules(_PHI3_LAYER, NORMS),
)
"""Llama whose weights are fused: queries, keys and values in one, gate and linear part in another."""


_MIXTRAL_EXPERTS: Final = {
    "block_sparse_moe.gate": "mlp.router",
    "block_sparse_moe.experts.{}.w1": "mlp.experts.{}.gate",
    "block_sparse_moe.experts.{}.w3": "mlp.experts.{}.up",
    "block_sparse_moe.experts.{}.w2": "mlp.experts.{}.down",
}

MISTRAL: Final = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    config=(*SWIGLU, QueryGroups(default=8), Rope(), Windows(default=4096)),
    modules=modules(LAYER),
    buffers=BUFFERS,
)
"""Llama with a sliding window in every layer."""
MIXTRAL: Final = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    config=(
        *SWIGLU,
        QueryGroups(default=8),
        Rope(base=1000000.0),
        Windows(),
        Value("num_local_experts", "experts.num_experts", default=8, also=("num_experts",)),
        Value("num_experts_per_tok", "experts.moe_router_topk", default=2),
        Value("intermediate_size", "experts.moe_ffn_hidden_size"),
        Fixed({"experts.moe_router_pre_softmax": False}),
    ),
    modules=modules(ATTENTION, NORMS, _MIXTRAL_EXPERTS),
    buffers=BUFFERS,
)
"""Mistral with experts; w1 is the gate, w3 the linear part, w2 the output."""


_OLMO: Final = (
    *SWIGLU,
    NO_ATTENTION_BIAS,
    QueryGroups(),
    Rope(),
    Fixed({"model.qk_layernorm": True, "model.qk_layernorm_width": "all_heads"}),
)
_NORMS_AFTER: Final = {
    "post_attention_layernorm": "attention.post_norm",
    "post_feedforward_layernorm": "mlp.post_norm",
}

OLMO2: Final = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    config=(*_OLMO, Fixed({"model.norm_position": "post"})),
    modules=modules(ATTENTION, MLP, QK_NORMS, _NORMS_AFTER),
)
"""Llama with norms after the branches; like OLMoE, it has norms of queries and keys over all heads."""
OLMOE: Final = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    config=(
        *_OLMO,
        Choice("clip_qkv", {None: {}}, reason="limits of queries, keys and values"),
        Value("num_experts", "experts.num_experts", default=64, also=("num_local_experts",)),
        Value("num_experts_per_tok", "experts.moe_router_topk", default=8),
        Value("intermediate_size", "experts.moe_ffn_hidden_size"),
        Not("norm_topk_prob", "experts.moe_router_pre_softmax", default=False),
    ),
    modules=modules(ATTENTION, NORMS, QK_NORMS, EXPERTS),
)
"""Llama with experts."""
