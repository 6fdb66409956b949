"""Families of models (`--model-family`): the stacks and the heads that they make of the layers that flags describe.

    gpt     decoder: the layers
    bert    encoder: the layers with attention to all tokens                    language-model head with a dense layer, pooler
    t5      encoder: the same; decoder: as many, each with cross-attention      language-model head, with a bias if it is tied
    vlm     decoder: the layers; a vision tower and a projector (`vision.py`)   never tied
    hybrid  decoder: the layers of the pattern, each of one part

Source: Megatron-LM, core/models/bert, core/models/T5, examples/bert, examples/t5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatrain.config.derive.hybrid_pattern import known_pattern, pattern_of_shares
from megatrain.config.model_spec.attention import AttentionSpec, RelativePositionSpec
from megatrain.config.model_spec.cross_attention import CrossAttentionSpec
from megatrain.config.model_spec.layer import LayerSpec
from megatrain.config.model_spec.mamba import MambaSpec
from megatrain.config.model_spec.stack import HeadSpec, Stack
from megatrain.config.schema.data import DataConfig
from megatrain.config.schema.model import ModelConfig
from megatrain.config.schema.tree import flag_of
from megatrain.config.schema.values import INVALID

BERT_SPECIAL_TOKENS = 3
"""Tokens of a sample of BERT that are no text, at most."""
NUM_TOKEN_TYPES = 2
"""BERT: the first and the second part of a sample."""


def num_layers(model: ModelConfig) -> int:
    """Return the layers of all stacks. As in Megatron-LM, --encoder-num-layers is the depth of both stacks of T5."""
    if model.model_family == "vlm":
        return model.decoder_num_layers or model.num_layers
    return model.num_layers * (2 if model.model_family == "t5" else 1)


def settings_of_pattern(known: Callable[[str], Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that the pattern of a hybrid decides, in place of given ones, and notes on these.

    Args:
        known: returns the value at a path, None if it is not known.
    """
    if known("model.model_family") != "hybrid":
        return {}, []
    text, num_layers = known("model.hybrid_layer_pattern"), known("model.num_layers")
    shares = {
        f"model.hybrid_{part}_ratio": known(f"model.hybrid_{part}_ratio") or 0.0
        for part in ("attention", "mlp")
    }
    notes = [
        f"{flag_of(path)} {share} has no effect with --hybrid-layer-pattern"
        for path, share in shares.items()
        if text is not None and share
    ]
    if text is None and num_layers is not None and sum(shares.values()) <= 1:
        text = pattern_of_shares(num_layers, *shares.values())
    pattern = known_pattern(text)
    if pattern is None or not pattern.layers:
        # A rule reports the pattern, which also decides the number of layers.
        return ({} if num_layers is not None else {"model.num_layers": INVALID}), []
    settings: dict[str, Any] = {"model.hybrid_layer_pattern": text, "model.num_layers": len(pattern.layers)}
    if pattern.num_depths and known("model.mtp_num_layers") is None:
        settings["model.mtp_num_layers"] = pattern.num_depths
    if pattern.counts["+"]:
        settings["model.multi_latent_attention"] = True
    settings = {path: value for path, value in settings.items() if known(path) != value}
    if num_layers not in (None, len(pattern.layers)):
        notes.append(
            f"--num-layers {num_layers} has no effect: --hybrid-layer-pattern has {len(pattern.layers)} layers"
        )
    return settings, notes


def stacks_of(model: ModelConfig, layers: Sequence[LayerSpec]) -> tuple[Stack, ...]:
    """Return the stacks of a family, from the layers of a GPT."""
    if model.model_family in ("gpt", "hybrid", "vlm"):
        return (Stack(layers=tuple(layers)),)
    encoder = Stack(name="encoder", layers=tuple(_encoder_layer(model, layer) for layer in layers))
    if model.model_family == "bert":
        return (encoder,)
    decoder = Stack(
        name="decoder",
        layers=tuple(_decoder_layer(model, layer) for layer in layers),
        seq_length=model.decoder_seq_length,
        memory="encoder",
    )
    return (encoder, decoder)


def max_labels(model: ModelConfig, data: DataConfig) -> int | None:
    """Return the most words that are masked in a sample of BERT, as `masked_runs` counts them; None for other families."""
    if model.model_family != "bert":
        return None
    return max(1, int(data.mask_prob * (data.seq_length - BERT_SPECIAL_TOKENS)))


def head_of(model: ModelConfig, labels: int | None = None) -> HeadSpec:
    """Return the heads of a family; `labels`: see `HeadSpec.max_labels`."""
    if model.model_family == "bert":
        return HeadSpec(
            has_transform=True,
            has_bias=True,
            is_binary=not model.bert_no_binary_head,
            averages_microbatches=True,
            max_labels=labels,
            has_accuracy=True,
        )
    is_t5 = model.model_family == "t5"
    return HeadSpec(has_bias=is_t5 and not model.untie_embeddings_and_output_weights, has_accuracy=is_t5)


def mamba_of(model: ModelConfig) -> MambaSpec:
    """Return the Mamba-2 mixer of a hybrid."""
    heads = model.mamba_num_heads
    return MambaSpec(
        num_heads=2 * model.hidden_size // model.mamba_head_dim if heads is None else heads,
        head_dim=model.mamba_head_dim,
        num_groups=model.mamba_num_groups,
        state_dim=model.mamba_state_dim,
        has_norm=not model.mamba_without_rmsnorm,
    )


def num_token_types(model: ModelConfig) -> int | None:
    """Return the rows of the embedding of token types; None: there is none."""
    return NUM_TOKEN_TYPES if head_of(model).is_binary else None


def _encoder_layer(model: ModelConfig, layer: LayerSpec) -> LayerSpec:
    if layer.attention is None:
        return layer
    relative = _relative(model, is_bidirectional=True)
    return layer.replaced(layer.attention, replace(layer.attention, mask="padding", relative=relative))


def _decoder_layer(model: ModelConfig, layer: LayerSpec) -> LayerSpec:
    if layer.attention is None:
        return layer
    own = replace(layer.attention, relative=_relative(model, is_bidirectional=False))
    parts = [
        new
        for part in layer.parts
        for new in ((own, _cross_attention(own)) if part is layer.attention else (part,))
    ]
    return replace(layer, parts=tuple(parts))


def _cross_attention(own: AttentionSpec) -> CrossAttentionSpec:
    return CrossAttentionSpec(
        num_heads=own.num_heads,
        head_dim=own.head_dim,
        scale=own.scale,
        dropout=own.dropout,
        has_qkv_bias=own.has_qkv_bias,
        has_bias=own.has_bias,
    )


def _relative(model: ModelConfig, *, is_bidirectional: bool) -> RelativePositionSpec | None:
    if model.position_embedding_type != "relative":
        return None
    return RelativePositionSpec(
        num_buckets=model.relative_attention_num_buckets,
        max_distance=model.relative_attention_max_distance,
        is_bidirectional=is_bidirectional,
    )
