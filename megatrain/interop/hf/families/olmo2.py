"""OLMo 2: Llama with norms after the branches, and norms of queries and keys over all heads."""

from typing import Final

from megatrain.interop.hf.config_parts import QueryGroups
from megatrain.interop.hf.families.llama import ATTENTION, MLP, NO_ATTENTION_BIAS, OUTER, QK_NORMS, SWIGLU
from megatrain.interop.hf.family import Family, Fixed, Fused, in_layers
from megatrain.interop.hf.rope import Rope

QK_LAYERNORM: Final = Fixed({"model.qk_layernorm": True, "model.qk_layernorm_width": "all_heads"})
_NORMS: Final[dict[str, str | Fused]] = {
    "post_attention_layernorm": "attention.post_norm",
    "post_feedforward_layernorm": "mlp.post_norm",
}

OLMO2: Final = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    config=(
        *SWIGLU,
        NO_ATTENTION_BIAS,
        QueryGroups(),
        Rope(),
        QK_LAYERNORM,
        Fixed({"model.norm_position": "post"}),
    ),
    modules={**OUTER, **in_layers("model.layers", {**ATTENTION, **MLP, **QK_NORMS, **_NORMS})},
)
