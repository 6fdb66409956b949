"""Heads of a model as data: the language-model head, and a next-sentence head (BERT)."""

from __future__ import annotations

from dataclasses import dataclass


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
