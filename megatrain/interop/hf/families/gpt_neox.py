"""GPT-NeoX and Pythia: one weight holds queries, keys and values, head by head; RoPE on some of the channels."""

from typing import Final

from megatrain.interop.hf.families.llama import SIZES
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

_LAYER: Final[Modules] = {
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
        **in_layers("gpt_neox.layers", _LAYER),
    },
    buffers=(r"gpt_neox\.layers\.\d+\.attention\.(masked_bias|bias|rotary_emb\.inv_freq)",),
)
