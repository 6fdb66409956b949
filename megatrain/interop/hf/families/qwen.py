"""Qwen 2 and 2.5: Llama with biases of queries, keys and values. Qwen 3: Llama with norms of queries and keys, head by head.

Both have models with experts in some or all layers; Qwen 2 has a shared expert too, whose output is multiplied by a sigmoid gate.
Qwen 3 Next: gated delta nets in most layers, gated attention in others; its prediction head stays out, as in transformers.
Qwen 3.5, of text: the same without experts, with a tensor for each projection of a delta net.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from megatrain.config.derive.patterns import MAX_LAYERS, parse_layer_pattern
from megatrain.config.schema.tree import Config
from megatrain.interop.hf.config_file import ConfigFile
from megatrain.interop.hf.config_parts import (
    ExpertLayers,
    QueryGroups,
    Windows,
    last_layers,
    layer_list,
    num_layers_of,
)
from megatrain.interop.hf.families.llama import (
    BUFFERS,
    EXPERTS,
    LAYER,
    NO_ATTENTION_BIAS,
    QK_NORMS,
    SWIGLU,
    modules,
)
from megatrain.interop.hf.family import COUNT, Choice, ConfigPart, Family, Fixed, Fused, Modules, Not, Value
from megatrain.interop.hf.rope import Rope
from megatrain.storage.untrusted_json import list_of, text

_WINDOWS: Final = Windows(default=4096, layers=last_layers, switch="use_sliding_window")
_WITH_BIAS: Final = (*SWIGLU, Fixed({"model.add_qkv_bias": True}), Rope())
_WITH_NORMS: Final = (*SWIGLU, NO_ATTENTION_BIAS, Fixed({"model.qk_layernorm": True}), Rope())
_EXPERTS: Final = (
    ExpertLayers(),
    Value("moe_intermediate_size", "experts.moe_ffn_hidden_size"),
    Not("norm_topk_prob", "experts.moe_router_pre_softmax", default=False),
    Choice("use_sliding_window", {False: {}}, reason="windows of this family are not converted"),
)


@dataclass(frozen=True)
class _DeltaNets:
    """Layers with delta nets: those that `layer_types` lists, or all but every `full_attention_interval`th."""

    kinds: ClassVar = ("full_attention", "linear_attention")

    def read(self, source: ConfigFile) -> dict[str, Any]:
        num_layers = num_layers_of(source)
        every = source.checked("full_attention_interval", check=COUNT, default=4)
        types = source.checked(
            "layer_types", check=list_of(text(self.kinds), most=MAX_LAYERS), is_optional=True
        )
        if types is None:
            types = [self.kinds[(number + 1) % every != 0] for number in range(num_layers)]
        if len(types) != num_layers:
            raise source.refusal("layer_types", types, f"{num_layers} layers need as many")
        return {
            "model.experimental_attention_variant": "gated_delta_net",
            "model.linear_attention_freq": layer_list([kind == self.kinds[1] for kind in types]),
        }

    def write(self, config: Config) -> dict[str, Any]:
        model = config.model
        is_linear = [False] * model.num_layers
        if model.linear_attention_freq is not None:
            is_linear = list(
                parse_layer_pattern(model.linear_attention_freq, model.num_layers, one_means=True)
            )
        return {"layer_types": [self.kinds[one] for one in is_linear]}


_BY_KEY_HEADS: Final[Modules] = {
    "linear_attn.in_proj_qkvz": Fused(
        tuple(f"linear_attention.{name}" for name in ("q", "k", "v", "gate")), heads="linear_num_key_heads"
    ),
    "linear_attn.in_proj_ba": Fused(
        ("linear_attention.beta", "linear_attention.alpha"), heads="linear_num_key_heads"
    ),
}
_BY_PROJECTION: Final[Modules] = {
    "linear_attn.in_proj_qkv": Fused(tuple(f"linear_attention.{name}" for name in "qkv")),
    "linear_attn.in_proj_z": "linear_attention.gate",
    "linear_attn.in_proj_b": "linear_attention.beta",
    "linear_attn.in_proj_a": "linear_attention.alpha",
}
_DELTA_NET: Final[Modules] = {
    "input_layernorm": Fused(("attention.norm", "linear_attention.norm"), is_one_of=True),
    "linear_attn.conv1d.weight": Fused(
        tuple(f"linear_attention.{name}.convolution" for name in "qkv"), is_filter=True
    ),
    "linear_attn.dt_bias": "linear_attention.dt_bias",
    "linear_attn.A_log": "linear_attention.a_log",
    "linear_attn.norm": Fused(
        ("linear_attention.out_norm",), offset=1.0
    ),  # stored as it is, all others minus 1
    "linear_attn.out_proj": "linear_attention.proj",
    "self_attn.q_proj": Fused(("attention.q", "attention.gate"), heads="num_attention_heads"),
}
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
BESIDE_DELTA_NETS: Final[tuple[ConfigPart, ...]] = (
    *SWIGLU,
    NO_ATTENTION_BIAS,
    Value("head_dim", "model.kv_channels", default=256, is_optional=True),
    Rope(
        partial="partial_rotary_factor",
        percent=0.25,
        of_images=("mrope_section", "mrope_interleaved"),
    ),
    *(
        Value(f"linear_{name}", f"model.linear_{name}", default=default)
        for name, default in {
            "conv_kernel_dim": 4,
            "key_head_dim": 128,
            "value_head_dim": 128,
            "num_key_heads": 16,
            "num_value_heads": 32,
        }.items()
    ),
    Fixed(
        {
            "model.qk_layernorm": True,
            "model.apply_layernorm_1p": True,
            "model.attention_output_gate": True,
        }
    ),
)
QWEN3_NEXT: Final = Family(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    config=(
        *BESIDE_DELTA_NETS,
        _DeltaNets(),
        QueryGroups(default=2),
        ExpertLayers(),
        Value("moe_intermediate_size", "experts.moe_ffn_hidden_size"),
        Not("norm_topk_prob", "experts.moe_router_pre_softmax", default=True),
        Value("num_experts", "experts.num_experts", default=512, also=("num_local_experts",)),
        Value("num_experts_per_tok", "experts.moe_router_topk", default=10),
        Value("shared_expert_intermediate_size", "experts.moe_shared_expert_intermediate_size", default=512),
        Fixed({"experts.moe_shared_expert_gate": True}),
    ),
    modules=modules(LAYER, QK_NORMS, EXPERTS, _SHARED, _DELTA_NET, _BY_KEY_HEADS),
    buffers=(r"mtp\..*",),
)
QWEN3_5: Final = Family(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    config=(*BESIDE_DELTA_NETS, _DeltaNets(), QueryGroups(default=4)),
    modules=modules(LAYER, QK_NORMS, _DELTA_NET, _BY_PROJECTION),
    buffers=(r"mtp\..*",),
)
