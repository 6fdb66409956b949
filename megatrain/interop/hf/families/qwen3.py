"""Qwen 3: Llama with norms of queries and keys, head by head."""

from typing import Final

from megatrain.interop.hf.config_parts import QueryGroups, Windows, last_layers
from megatrain.interop.hf.families.llama import LAYER, NO_ATTENTION_BIAS, OUTER, QK_NORMS, SWIGLU
from megatrain.interop.hf.family import Family, Fixed, Value, in_layers
from megatrain.interop.hf.rope import Rope

CONFIG: Final = (
    *SWIGLU,
    NO_ATTENTION_BIAS,
    Fixed({"model.qk_layernorm": True}),
    Rope(),
)
HEAD_DIM: Final = Value("head_dim", "model.kv_channels", default=128, is_optional=True)

QWEN3: Final = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    config=(
        *CONFIG,
        HEAD_DIM,
        QueryGroups(default=32),
        Windows(default=4096, layers=last_layers, switch="use_sliding_window"),
    ),
    modules={**OUTER, **in_layers("model.layers", {**LAYER, **QK_NORMS})},
)
