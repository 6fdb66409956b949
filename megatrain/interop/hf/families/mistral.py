"""Mistral: Llama with a sliding window in every layer. Mixtral: Mistral with experts; w1 is the gate, w3 the linear part, w2 the output."""

from typing import Final

from megatrain.interop.hf.config_parts import QueryGroups, Windows
from megatrain.interop.hf.families.llama import ATTENTION, BUFFERS, LAYER, NORMS, SWIGLU, modules
from megatrain.interop.hf.family import Family, Fixed, Value
from megatrain.interop.hf.rope import Rope

_EXPERTS: Final = {
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
    modules=modules(ATTENTION, NORMS, _EXPERTS),
    buffers=BUFFERS,
)
