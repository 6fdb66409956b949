"""Qwen 2 and 2.5: Llama with biases of queries, keys and values. Qwen 3: Llama with norms of queries and keys, head by head.

Both have models with experts in some or all layers; Qwen 2 has a shared expert too, whose output is multiplied by a sigmoid gate.
"""

from typing import Final

from megatrain.interop.hf.config_parts import ExpertLayers, QueryGroups, Windows, last_layers
from megatrain.interop.hf.families.llama import (
    BUFFERS,
    EXPERTS,
    LAYER,
    NO_ATTENTION_BIAS,
    QK_NORMS,
    SWIGLU,
    modules,
)
from megatrain.interop.hf.family import Choice, Family, Fixed, Not, Value
from megatrain.interop.hf.rope import Rope

_WINDOWS: Final = Windows(default=4096, layers=last_layers, switch="use_sliding_window")
_WITH_BIAS: Final = (*SWIGLU, Fixed({"model.add_qkv_bias": True}), Rope())
_WITH_NORMS: Final = (*SWIGLU, NO_ATTENTION_BIAS, Fixed({"model.qk_layernorm": True}), Rope())
_EXPERTS: Final = (
    ExpertLayers(),
    Value("moe_intermediate_size", "experts.moe_ffn_hidden_size"),
    Not("norm_topk_prob", "experts.moe_router_pre_softmax", default=False),
    Choice("use_sliding_window", {False: {}}, reason="windows of this family are not converted"),
)
_SHARED: Final = {
    "mlp.shared_expert.gate_proj": "mlp.shared.gate",
    "mlp.shared_expert.up_proj": "mlp.shared.up",
    "mlp.shared_expert.down_proj": "mlp.shared.down",
    "mlp.shared_expert_gate": "mlp.shared_gate",
}

QWEN2: Final = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    config=(*_WITH_BIAS, QueryGroups(default=32), _WINDOWS),
    modules=modules(LAYER),
    buffers=BUFFERS,
)
QWEN2_MOE: Final = Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    config=(
        *_WITH_BIAS,
        QueryGroups(default=16),
        *_EXPERTS,
        Choice("qkv_bias", {True: {}}),
        Value("num_experts", "experts.num_experts", default=60, also=("num_local_experts",)),
        Value("num_experts_per_tok", "experts.moe_router_topk", default=4),
        Value("shared_expert_intermediate_size", "experts.moe_shared_expert_intermediate_size", default=5632),
        Fixed({"experts.moe_shared_expert_gate": True}),
    ),
    modules=modules(LAYER, EXPERTS, _SHARED),
)
QWEN3: Final = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    config=(
        *_WITH_NORMS,
        Value("head_dim", "model.kv_channels", default=128, is_optional=True),
        QueryGroups(default=32),
        _WINDOWS,
    ),
    modules=modules(LAYER, QK_NORMS),
)
QWEN3_MOE: Final = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    config=(
        *_WITH_NORMS,
        QueryGroups(default=4),
        *_EXPERTS,
        Value("num_experts", "experts.num_experts", default=128, also=("num_local_experts",)),
        Value("num_experts_per_tok", "experts.moe_router_topk", default=8),
    ),
    modules=modules(LAYER, QK_NORMS, EXPERTS),
)
