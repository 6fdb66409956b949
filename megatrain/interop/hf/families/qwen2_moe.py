"""Qwen 2 MoE: Qwen 2 with experts, and a shared expert whose output is multiplied by a sigmoid gate."""

from typing import Final

from megatrain.interop.hf.config_parts import QueryGroups
from megatrain.interop.hf.families.llama import LAYER, OUTER, SWIGLU
from megatrain.interop.hf.families.qwen2 import QKV_BIAS
from megatrain.interop.hf.families.qwen3_moe import EXPERT_CONFIG, EXPERTS
from megatrain.interop.hf.family import Choice, Family, Fixed, Fused, Value, in_layers
from megatrain.interop.hf.rope import Rope

_SHARED: Final[dict[str, str | Fused]] = {
    "mlp.shared_expert.gate_proj": "mlp.shared.gate",
    "mlp.shared_expert.up_proj": "mlp.shared.up",
    "mlp.shared_expert.down_proj": "mlp.shared.down",
    "mlp.shared_expert_gate": "mlp.shared_gate",
}

QWEN2_MOE: Final = Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    config=(
        *SWIGLU,
        QKV_BIAS,
        QueryGroups(default=16),
        Rope(),
        *EXPERT_CONFIG,
        Choice("qkv_bias", {True: {}}),
        Value("num_experts", "experts.num_experts", default=60, also=("num_local_experts",)),
        Value("num_experts_per_tok", "experts.moe_router_topk", default=4),
        Value("shared_expert_intermediate_size", "experts.moe_shared_expert_intermediate_size", default=5632),
        Fixed({"experts.moe_shared_expert_gate": True}),
    ),
    modules={**OUTER, **in_layers("model.layers", {**LAYER, **EXPERTS, **_SHARED})},
)
