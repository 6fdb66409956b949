"""GPT-2, GPT-NeoX and Pythia, StarCoder2, gpt-oss.

GPT-2      weights are [inputs, outputs], and one holds queries, keys and values
GPT-NeoX   one weight holds queries, keys and values, head by head; RoPE on some of the channels
StarCoder2 GPT-2's norms and MLPs with grouped queries, RoPE and windows
gpt-oss    sinks, windows in every second layer, biases, and experts stored as one tensor, transposed, gate and up in turns, or in MXFP4
"""

from typing import Final

from megatrain.interop.hf.config_parts import QueryGroups, Windows, every_second
from megatrain.interop.hf.families.llama import ATTENTION, NORMS, SIZES, modules
from megatrain.interop.hf.family import (
    POSITIVE,
    PROBABILITY,
    Choice,
    Family,
    Fixed,
    Fused,
    Modules,
    Not,
    Value,
    in_layers,
)
from megatrain.interop.hf.rope import Rope


def _transposed(*names: str) -> Fused:
    return Fused(names, is_transposed=True)


_GPT2_LAYER: Final[Modules] = {
    "ln_1": "attention.norm",
    "attn.c_attn": _transposed("attention.q", "attention.k", "attention.v"),
    "attn.c_proj": _transposed("attention.proj"),
    "ln_2": "mlp.norm",
    "mlp.c_fc": _transposed("mlp.up"),
    "mlp.c_proj": _transposed("mlp.down"),
}

GPT2: Final = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    config=(
        Value("n_embd", "model.hidden_size"),
        Value("n_layer", "model.num_layers"),
        Value("n_head", "model.num_attention_heads"),
        Value("n_inner", "model.ffn_hidden_size", is_optional=True),
        Value("n_positions", "model.max_position_embeddings"),
        Value("layer_norm_epsilon", "model.norm_epsilon", POSITIVE, default=1e-5),
        Value("attn_pdrop", "model.attention_dropout", PROBABILITY, default=0.1),
        Value("embd_pdrop", "model.hidden_dropout", PROBABILITY, default=0.1),
        Value("resid_pdrop", "model.hidden_dropout", PROBABILITY, default=0.1),
        Not("tie_word_embeddings", "model.untie_embeddings_and_output_weights", default=True),
        Choice(
            "activation_function",
            {"gelu_new": {}, "gelu_pytorch_tanh": {}, "gelu": {"model.no_bias_gelu_fusion": True}},
        ),
        Choice("scale_attn_weights", {True: {}}),
        Choice("scale_attn_by_inverse_layer_idx", {False: {}}),
        Choice("add_cross_attention", {False: {}}),
        Fixed({"model.normalization": "LayerNorm", "model.position_embedding_type": "learned_absolute"}),
    ),
    modules={
        "transformer.wte": "embedding.word_embeddings",
        "transformer.wpe": "embedding.position_embeddings",
        "transformer.ln_f": "decoder.final_norm",
        "lm_head": "output_layer",
        **in_layers("transformer.h", _GPT2_LAYER),
    },
    optional_prefix="transformer.",
    buffers=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
)


_NEOX_LAYER: Final[Modules] = {
    "input_layernorm": "attention.norm",
    "attention.query_key_value": Fused(
        ("attention.q", "attention.k", "attention.v"), heads="num_attention_heads"
    ),
    "attention.dense": "attention.proj",
    "post_attention_layernorm": "mlp.norm",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}
_EXACT: Final = {"model.no_bias_gelu_fusion": True}

GPT_NEOX: Final = Family(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    config=(
        *SIZES,
        Value("layer_norm_eps", "model.norm_epsilon", POSITIVE, default=1e-5),
        Value("hidden_dropout", "model.hidden_dropout", PROBABILITY, default=0.0),
        Not("tie_word_embeddings", "model.untie_embeddings_and_output_weights", default=False),
        Rope(theta="rotary_emb_base", partial="rotary_pct", percent=0.25, types=("default", "linear")),
        Choice("hidden_act", {"gelu": _EXACT, "gelu_new": {}, "gelu_pytorch_tanh": {}, "gelu_fast": {}}),
        Choice("attention_bias", {True: {}}),
        Choice(
            "use_parallel_residual",
            {True: {"model.use_parallel_residual": True}, False: {}},
        ),
        Fixed({"model.normalization": "LayerNorm"}),
    ),
    modules={
        "gpt_neox.embed_in": "embedding.word_embeddings",
        "gpt_neox.final_layer_norm": "decoder.final_norm",
        "embed_out": "output_layer",
        **in_layers("gpt_neox.layers", _NEOX_LAYER),
    },
    buffers=(r"gpt_neox\.layers\.\d+\.attention\.(masked_bias|bias|rotary_emb\.inv_freq)",),
)

_STARCODER2_MLP: Final[Modules] = {"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}

STARCODER2: Final = Family(
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    config=(
        *SIZES,
        Value("norm_epsilon", "model.norm_epsilon", POSITIVE, default=1e-5),
        Value("residual_dropout", "model.hidden_dropout", PROBABILITY, default=0.0),
        Value("embedding_dropout", "model.hidden_dropout", PROBABILITY, default=0.0),
        Not("tie_word_embeddings", "model.untie_embeddings_and_output_weights", default=True),
        Choice("hidden_act", {"gelu_pytorch_tanh": {}, "gelu_new": {}, "gelu": _EXACT}),
        Choice("use_bias", {True: {}, False: {"model.disable_bias_linear": True}}),
        QueryGroups(default=2),
        Rope(),
        Windows(),
        Fixed({"model.normalization": "LayerNorm"}),
    ),
    modules=modules(ATTENTION, NORMS, _STARCODER2_MLP),
)


_YARN: Final = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_OSS_LAYER: Final[Modules] = {
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
    modules=modules(ATTENTION, NORMS, _OSS_LAYER),
    has_mxfp4=True,
)
