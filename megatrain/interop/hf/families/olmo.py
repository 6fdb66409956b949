"""OLMo 2: Llama with norms after the branches. OLMoE: Llama with experts. Both have norms of queries and keys over all heads."""

from typing import Final

from megatrain.interop.hf.config_parts import QueryGroups
from megatrain.interop.hf.families.llama import (
    ATTENTION,
    EXPERTS,
    MLP,
    NO_ATTENTION_BIAS,
    NORMS,
    QK_NORMS,
    SWIGLU,
    modules,
)
from megatrain.interop.hf.family import Choice, Family, Fixed, Not, Value
from megatrain.interop.hf.rope import Rope

_COMMON: Final = (
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
    config=(*_COMMON, Fixed({"model.norm_position": "post"})),
    modules=modules(ATTENTION, MLP, QK_NORMS, _NORMS_AFTER),
)
OLMOE: Final = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    config=(
        *_COMMON,
        Choice("clip_qkv", {None: {}}, reason="limits of queries, keys and values"),
        Value("num_experts", "experts.num_experts", default=64, also=("num_local_experts",)),
        Value("num_experts_per_tok", "experts.moe_router_topk", default=8),
        Value("intermediate_size", "experts.moe_ffn_hidden_size"),
        Not("norm_topk_prob", "experts.moe_router_pre_softmax", default=False),
    ),
    modules=modules(ATTENTION, NORMS, QK_NORMS, EXPERTS),
)
