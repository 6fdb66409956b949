"""OLMoE: Llama with experts, and norms of queries and keys over all heads."""

from typing import Final

from megatrain.interop.hf.config_parts import QueryGroups
from megatrain.interop.hf.families.llama import ATTENTION, NO_ATTENTION_BIAS, NORMS, OUTER, QK_NORMS, SWIGLU
from megatrain.interop.hf.families.olmo2 import QK_LAYERNORM
from megatrain.interop.hf.families.qwen3_moe import EXPERTS
from megatrain.interop.hf.family import Choice, Family, Not, Value, in_layers
from megatrain.interop.hf.rope import Rope

OLMOE: Final = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    config=(
        *SWIGLU,
        NO_ATTENTION_BIAS,
        QueryGroups(),
        Rope(),
        QK_LAYERNORM,
        Choice("clip_qkv", {None: {}}, reason="limits of queries, keys and values"),
        Value("num_experts", "experts.num_experts", default=64, also=("num_local_experts",)),
        Value("num_experts_per_tok", "experts.moe_router_topk", default=8),
        Value("intermediate_size", "experts.moe_ffn_hidden_size"),
        Not("norm_topk_prob", "experts.moe_router_pre_softmax", default=False),
    ),
    modules={**OUTER, **in_layers("model.layers", {**ATTENTION, **NORMS, **QK_NORMS, **EXPERTS})},
)
