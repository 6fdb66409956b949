"""Qwen 2 and 2.5: Llama with biases of queries, keys and values."""

from typing import Final

from megatrain.interop.hf.config_parts import QueryGroups, Windows, last_layers
from megatrain.interop.hf.families.llama import BUFFERS, MODULES, SWIGLU
from megatrain.interop.hf.family import Family, Fixed
from megatrain.interop.hf.rope import Rope

QKV_BIAS: Final = Fixed({"model.add_qkv_bias": True})

QWEN2: Final = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    config=(
        *SWIGLU,
        QKV_BIAS,
        QueryGroups(default=32),
        Rope(),
        Windows(default=4096, layers=last_layers, switch="use_sliding_window"),
    ),
    modules=MODULES,
    buffers=BUFFERS,
)
