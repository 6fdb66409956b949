"""GPT-2: weights are [inputs, outputs], and one holds queries, keys and values."""

from typing import Final

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


def _transposed(*names: str) -> Fused:
    return Fused(names, is_transposed=True)


_LAYER: Final[Modules] = {
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
        **in_layers("transformer.h", _LAYER),
    },
    optional_prefix="transformer.",
    buffers=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
)
