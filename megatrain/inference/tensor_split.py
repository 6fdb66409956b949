"""Split of a model over tensor ranks for inference: sizes that do not divide are errors, the vocabulary is padded again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatrain.config.errors import ConfigError
from megatrain.config.model_spec.layer import LayerSpec
from megatrain.config.model_spec.model import ModelSpec
from megatrain.parallel.rank_lists import GridShape


def without_capacity(spec: ModelSpec) -> ModelSpec:
    """Return the model without limits of the experts' loads: dropped assignments would depend on other sequences."""

    def unlimited(layer: LayerSpec) -> LayerSpec:
        if layer.experts is None:
            return layer
        router = dataclasses.replace(layer.experts.router, capacity_factor=None, is_padded=False)
        return layer.replaced(layer.experts, dataclasses.replace(layer.experts, router=router))

    return spec.with_layers(tuple(map(unlimited, spec.layers)))


def split_over_ranks(spec: ModelSpec, tp_size: int) -> tuple[ModelSpec, GridShape]:
    """Return the model with a vocabulary padded for `tp_size` ranks, and the shape of their grid.

    Raises:
        ConfigError: sizes do not divide over the ranks.
    """
    if tp_size == 1:
        return spec, GridShape()
    wrong = next((text for text, divides in tensor_sizes(spec, tp_size) if not divides), None)
    groups = {layer.attention.num_query_groups for layer in spec.layers if layer.attention is not None}
    fewer = {count for count in groups if count < tp_size}
    if wrong is None and len(fewer) > 1:
        wrong = f"query groups, {sorted(fewer)} of them by layer,"
    if wrong is not None:
        raise ConfigError(
            f"{tp_size} tensor ranks: {wrong} of the model do not divide over them",
            fix="start fewer ranks (--nproc-per-node of torchrun), or one process without torchrun",
        )
    rows = -(-spec.vocab_size // tp_size) * tp_size
    has_experts = any(layer.experts is not None for layer in spec.layers)
    copies = tp_size // min(fewer) if fewer else 1
    shape = GridShape(tp=tp_size, etp=tp_size if has_experts else None, kv_copies=copies)
    return dataclasses.replace(spec, padded_vocab_size=rows), shape


def tensor_sizes(spec: ModelSpec, tp_size: int) -> Iterator[tuple[str, bool]]:
    """Yield the sizes that are split, each as a text, and whether it divides over the ranks."""
    for layer in spec.layers:
        for linear in layer.linears(spec.hidden_size):
            for piece in linear.pieces if linear.split == "outputs" else ():
                what = piece.unit if piece.heads else f"channels of {linear.writes}"
                yield f"{piece.count} {what}", piece.divides_over(tp_size)
            if linear.split == "inputs":
                yield f"{linear.inputs} channels of {linear.reads}", linear.inputs % tp_size == 0
