"""Layer specs: for each layer of the model, which parts make it, as data.

    LayerSpec = mixer (attention) + mlp, each behind a norm and beside a residual connection

What a spec does not say (dtype, ranks, kernels) is the implementation's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatrain.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Causal self-attention with grouped queries."""

    num_heads: int
    num_query_groups: int
    head_channels: int
    rotary_base: float | None
    """None: no rotary embedding."""


@dataclass(frozen=True, kw_only=True)
class MlpSpec:
    """Gated feed-forward layer: down(silu(gate x) * up x)."""

    ffn_hidden_size: int


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer."""

    mixer: AttentionSpec
    mlp: MlpSpec


@dataclass(frozen=True, kw_only=True)
class GptSpec:
    """A whole model: what every rank agrees on before any rank builds its part."""

    hidden_size: int
    vocab_size: int
    """Of the tokenizer."""
    padded_vocab_size: int
    layers: tuple[LayerSpec, ...]
    norm_epsilon: float
    is_tied: bool
    """Whether the head uses the embedding's weights."""
    init_std: float
    output_init_std: float
    """For the layers that write into the residual stream."""


def gpt_spec(model: ModelConfig, *, vocab_size: int) -> GptSpec:
    """The spec that a resolved configuration describes."""
    layer = LayerSpec(
        mixer=AttentionSpec(
            num_heads=model.num_attention_heads,
            num_query_groups=model.num_query_groups,
            head_channels=model.kv_channels,
            rotary_base=float(model.rotary_base) if model.position_embedding_type == "rope" else None,
        ),
        mlp=MlpSpec(ffn_hidden_size=model.ffn_hidden_size),
    )
    return GptSpec(
        hidden_size=model.hidden_size,
        vocab_size=vocab_size,
        padded_vocab_size=model.padded_vocab_size,
        layers=(layer,) * model.num_layers,
        norm_epsilon=model.norm_epsilon,
        is_tied=not model.untie_embeddings_and_output_weights,
        init_std=model.init_method_std,
        output_init_std=model.init_method_std / math.sqrt(2 * model.num_layers),
    )
