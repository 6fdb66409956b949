"""Qwen 3 MoE: Qwen 3 with experts in some or all layers."""

from typing import Final

from megatrain.interop.hf.config_parts import ExpertLayers, QueryGroups
from megatrain.interop.hf.families.llama import LAYER, OUTER, QK_NORMS
from megatrain.interop.hf.families.qwen3 import CONFIG
from megatrain.interop.hf.family import Choice, ConfigPart, Family, Fused, Not, Value, in_layers

EXPERT_CONFIG: Final[tuple[ConfigPart, ...]] = (
    ExpertLayers(),
    Value("moe_intermediate_size", "experts.moe_ffn_hidden_size"),
    Not("norm_topk_prob", "experts.moe_router_pre_softmax", default=False),
    Choice("use_sliding_window", {False: {}}, reason="windows of this family are not converted"),
)
EXPERTS: Final[dict[str, str | Fused]] = {
    "mlp.gate": "mlp.router",
    "mlp.experts.{}.gate_proj": "mlp.experts.{}.gate",
    "mlp.experts.{}.up_proj": "mlp.experts.{}.up",
    "mlp.experts.{}.down_proj": "mlp.experts.{}.down",
}

QWEN3_MOE: Final = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    config=(
        *CONFIG,
        QueryGroups(default=4),
        *EXPERT_CONFIG,
        Value("num_experts", "experts.num_experts", default=128, also=("num_local_experts",)),
        Value("num_experts_per_tok", "experts.moe_router_topk", default=8),
    ),
    modules={**OUTER, **in_layers("model.layers", {**LAYER, **QK_NORMS, **EXPERTS})},
)
