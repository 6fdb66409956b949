"""A stack of layers: one residual stream, from embedded tokens to its final norm; and the heads after the last one.

    GPT     decoder
    BERT    encoder
    T5      encoder ─ memory ─> decoder          its cross-attention reads the memory, the normalized output of the encoder

All stacks embed their tokens with the same tables. The last stack feeds the head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatrain.config.model_spec.layer import LayerSpec


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Consecutive layers. The first stack of a model runs first."""

    name: str = "decoder"
    """Prefix of the canonical names of its layers and of its final norm."""
    layers: tuple[LayerSpec, ...]
    seq_length: int | None = None
    """Tokens of a sample in this stack; None: as many as a sample of the data has."""
    memory: str | None = None
    """Name of the stack before it, whose output its cross-attention reads; None: it reads no other stack."""

    def with_layers(self, layers: Iterator[LayerSpec]) -> Stack:
        """Return the stack with the next of these layers in place of its own."""
        return replace(self, layers=tuple(layer for _, layer in zip(self.layers, layers, strict=False)))


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """Modules after the final norm of the last stack."""

    has_transform: bool = False
    """A dense layer, exact GELU and a norm precede the output layer."""
    has_bias: bool = False
    """The logits have a bias per id."""
    is_binary: bool = False
    """A pooler of the first token and two classes, whose loss is added: are the sentences in order?"""
    averages_microbatches: bool = False
    """Reported losses are means over micro-batches, not over tokens."""
    max_labels: int | None = None
    """Labels that a sample has at most: only the logits of their tokens are computed; None: those of all tokens."""
    has_accuracy: bool = False
    """Evaluation reports the share of the labels that have the largest logit."""
