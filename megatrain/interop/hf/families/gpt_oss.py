"""gpt-oss: sinks, windows in every second layer, biases, and experts stored as one tensor, transposed, gate and up in turns, or in MXFP4."""

from typing import Final

from megatrain.interop.hf.config_parts import QueryGroups, Windows, every_second
from megatrain.interop.hf.families.llama import ATTENTION, NORMS, SIZES, modules
from megatrain.interop.hf.family import POSITIVE, Choice, Family, Fixed, Fused, Modules, Not, Value
from megatrain.interop.hf.rope import Rope

_YARN: Final = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_LAYER: Final[Modules] = {
    "self_attn.sinks": "attention.sink",
    "mlp.router": "mlp.router",
    "mlp.experts.gate_up_proj": Fused(
        ("mlp.experts.{}.gate", "mlp.experts.{}.up"), is_transposed=True, in_turns=True, is_stacked=True
    ),
    "mlp.experts.down_proj": Fused(("mlp.experts.{}.down",), is_transposed=True, is_stacked=True),
}

GPT_OSS: Final = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    config=(
        *SIZES,
        Value("head_dim", "model.kv_channels", default=64),
        Value("rms_norm_eps", "model.norm_epsilon", POSITIVE),
        Not("tie_word_embeddings", "model.untie_embeddings_and_output_weights", default=False),
        Choice("hidden_act", {"silu": {}}),
        Choice("attention_bias", {True: {}}),
        Choice("swiglu_alpha", {1.702: {}}),
        QueryGroups(default=8),
        Rope(base=150000.0, absent=_YARN),
        Windows(default=128, layers=every_second),
        Value("swiglu_limit", "model.activation_func_clamp_value", POSITIVE, default=7.0),
        Value("num_local_experts", "experts.num_experts", default=128, also=("num_experts",)),
        Value("num_experts_per_tok", "experts.moe_router_topk", default=4, also=("experts_per_token",)),
        Value("intermediate_size", "experts.moe_ffn_hidden_size"),
        Fixed(
            {
                "model.normalization": "RMSNorm",
                "model.softmax_type": "learnable",
                "model.quick_geglu": True,
                "model.glu_linear_offset": 1.0,
                "model.hidden_dropout": 0.0,
                "experts.moe_router_pre_softmax": False,
            }
        ),
    ),
    modules=modules(ATTENTION, NORMS, _LAYER),
    has_mxfp4=True,
)
