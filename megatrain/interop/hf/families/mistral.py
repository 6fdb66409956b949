"""Mistral: Llama with a sliding window in every layer."""

from typing import Final

from megatrain.interop.hf.config_parts import QueryGroups, Windows
from megatrain.interop.hf.families.llama import BUFFERS, MODULES, SWIGLU
from megatrain.interop.hf.family import Family
from megatrain.interop.hf.rope import Rope

MISTRAL: Final = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    config=(*SWIGLU, QueryGroups(default=8), Rope(), Windows(default=4096)),
    modules=MODULES,
    buffers=BUFFERS,
)
