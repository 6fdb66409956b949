"""Phi-3: Llama whose weights are fused: queries, keys and values in one, gate and linear part in another."""

from typing import Final

from megatrain.interop.hf.config_parts import QueryGroups, Windows
from megatrain.interop.hf.families.llama import NORMS, SWIGLU, modules
from megatrain.interop.hf.family import Family, Fused, Modules
from megatrain.interop.hf.rope import Rope

_LAYER: Final[Modules] = {
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
    modules=modules(_LAYER, NORMS),
)
