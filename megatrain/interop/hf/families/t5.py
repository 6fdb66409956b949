"""T5 v1.1: relative positions of a stack, unscaled scores, gated MLPs, an untied output layer. Its v1.0 differs in the last two."""

from typing import Any, Final

from megatrain.config.schema.tree import Config
from megatrain.interop.hf.config_file import ConfigFile
from megatrain.interop.hf.family import (
    COUNT,
    POSITIVE,
    PROBABILITY,
    Choice,
    Family,
    Fixed,
    Fused,
    Implied,
    Value,
    in_layers,
)

_LAYERS: Final = "num_decoder_layers"
_GATED: Final = {"gated-gelu": ("model.geglu", "gelu_new"), "gated-silu": ("model.swiglu", "silu")}
"""Settings of the values of feed_forward_proj, with the activation that each means."""


class _EqualStacks:
    """Both stacks have `num_layers` layers, and samples of one length."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        depth = source.checked("num_layers", check=COUNT)
        of_decoder = source.checked(_LAYERS, check=COUNT, default=depth, is_optional=True)
        if of_decoder not in (None, depth):
            raise source.refusal(
                _LAYERS, of_decoder, f"with num_layers {depth}; both stacks are equally deep"
            )
        length = source.checked("n_positions", check=COUNT, default=512)
        return {
            "model.num_layers": depth,
            "model.max_position_embeddings": length,
            "model.decoder_seq_length": length,
        }

    def write(self, config: Config) -> dict[str, Any]:
        model = config.model
        return {
            "num_layers": model.num_layers,
            _LAYERS: model.num_layers,
            "n_positions": model.max_position_embeddings,
        }


class _GatedMlp:
    """The activation of the MLP, by two keys."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        kind = source.get("feed_forward_proj", default="relu")
        setting, function = _GATED.get(kind, ("", "")) if isinstance(kind, str) else ("", "")
        if not setting:
            raise source.refusal("feed_forward_proj", kind, "v1.1 has gated MLPs; ReLU, of v1.0, is missing")
        if source.get("dense_act_fn", default=function) != function:
            raise source.refusal("dense_act_fn", source.get("dense_act_fn"), f"with {kind}")
        return {setting: True}

    def write(self, config: Config) -> dict[str, Any]:
        return {"feed_forward_proj": next((kind for kind, one in _GATED.items() if config.get(one[0])), None)}


class _Untied:
    """The output layer of v1.1. transformers 5 stores that it is tied, and that it does not scale the decoder's output."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        is_tied = source.get("tie_word_embeddings", default=True)
        if source.get("scale_decoder_outputs", default=is_tied) is not False:
            raise source.refusal(
                "tie_word_embeddings",
                is_tied,
                "tied logits have a bias here, none in T5, and a factor in v1.0 (scale_decoder_outputs)",
            )
        return {"model.untie_embeddings_and_output_weights": True}

    def write(self, config: Config) -> dict[str, Any]:
        is_tied = not config.model.untie_embeddings_and_output_weights
        return {"tie_word_embeddings": is_tied, "scale_decoder_outputs": is_tied}


def _attention(theirs: str, ours: str) -> dict[str, str | Fused]:
    return {**{f"{theirs}.{one}": f"{ours}.{one}" for one in "qkv"}, f"{theirs}.o": f"{ours}.proj"}


def _layer(mlp: str) -> dict[str, str | Fused]:
    """Return the modules of a layer of either stack. `mlp`: prefix of its last branch."""
    return {
        "layer.0.layer_norm": "attention.norm",
        **_attention("layer.0.SelfAttention", "attention"),
        f"{mlp}.layer_norm": "mlp.norm",
        f"{mlp}.DenseReluDense.wi_0": "mlp.gate",
        f"{mlp}.DenseReluDense.wi_1": "mlp.up",
        f"{mlp}.DenseReluDense.wo": "mlp.down",
    }


_CROSS_ATTENTION: Final[dict[str, str | Fused]] = {
    "layer.1.layer_norm": "cross_attention.norm",
    **_attention("layer.1.EncDecAttention", "cross_attention"),
}
_TABLE: Final = "block.0.layer.0.SelfAttention.relative_attention_bias"

T5: Final = Family(
    architecture="T5ForConditionalGeneration",
    model_type="t5",
    auto_class="AutoModelForSeq2SeqLM",
    config=(
        Value("d_model", "model.hidden_size"),
        Value("d_ff", "model.ffn_hidden_size"),
        Value("d_kv", "model.kv_channels"),
        Value("num_heads", "model.num_attention_heads"),
        _EqualStacks(),
        Value("relative_attention_num_buckets", "model.relative_attention_num_buckets", default=32),
        Value("relative_attention_max_distance", "model.relative_attention_max_distance", default=128),
        Value("dropout_rate", "model.attention_dropout", PROBABILITY, default=0.1),
        Value("dropout_rate", "model.hidden_dropout", PROBABILITY, default=0.1),
        Value("layer_norm_epsilon", "model.norm_epsilon", POSITIVE, default=1e-6),
        _GatedMlp(),
        _Untied(),
        Choice("is_encoder_decoder", {True: {}}),
        Implied(("is_gated_act", "initializer_factor", "decoder_start_token_id")),
        Fixed(
            {
                "model.model_family": "t5",
                "model.normalization": "RMSNorm",
                "model.disable_bias_linear": True,
                "model.position_embedding_type": "relative",
                "model.softmax_scale": 1.0,
            }
        ),
    ),
    modules={
        "shared": "embedding.word_embeddings",
        f"encoder.{_TABLE}": "encoder.relative_positions",
        **in_layers("encoder.block", _layer("layer.1"), "encoder"),
        "encoder.final_layer_norm": "encoder.final_norm",
        f"decoder.{_TABLE}": "decoder.relative_positions",
        **in_layers("decoder.block", _layer("layer.2") | _CROSS_ATTENTION),
        "decoder.final_layer_norm": "decoder.final_norm",
        "lm_head": "output_layer",
    },
    copies={"lm_head.weight": "shared.weight"},
    buffers=(
        r"(en|de)coder\.embed_tokens\.weight",
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ),
)
