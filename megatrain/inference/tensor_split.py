"""Split of a model over tensor ranks for inference: sizes that do not divide are errors, the vocabulary is padded again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatrain.config.errors import ConfigError
from megatrain.model.specs import AttentionSpec, ExpertsSpec, GptSpec, LayerSpec, LinearAttentionSpec
from megatrain.parallel.rank_lists import GridShape


def without_capacity(spec: GptSpec) -> GptSpec:
    """Return the model without limits of the experts' loads: dropped assignments would depend on other sequences."""

    def unlimited(layer: LayerSpec) -> LayerSpec:
        if not isinstance(layer.mlp, ExpertsSpec):
            return layer
        router = dataclasses.replace(layer.mlp.router, capacity_factor=None, is_padded=False)
        return dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, router=router))

    return dataclasses.replace(spec, layers=tuple(map(unlimited, spec.layers)))


def split_over_ranks(spec: GptSpec, tp_size: int) -> tuple[GptSpec, GridShape]:
    """Return the model with a vocabulary padded for `tp_size` ranks, and the shape of their grid.

    Raises:
        ConfigError: sizes do not divide over the ranks.
    """
    if tp_size == 1:
        return spec, GridShape()
    wrong = next((text for text, size in _sizes(spec) if size % tp_size), None)
    groups = {layer.mixer.num_query_groups for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)}
    fewer = {count for count in groups if count < tp_size}
    if wrong is None and any(tp_size % count for count in fewer):
        wrong = f"{min(fewer)} key and value heads"
    if wrong is None and len(fewer) > 1:
        wrong = f"key and value heads, {sorted(fewer)} of them by layer,"
    if wrong is not None:
        raise ConfigError(
            f"{tp_size} tensor ranks: {wrong} of the model do not divide over them",
            fix="start fewer ranks (--nproc-per-node of torchrun), or one process without torchrun",
        )
    rows = -(-spec.vocab_size // tp_size) * tp_size
    has_experts = any(isinstance(layer.mlp, ExpertsSpec) for layer in spec.layers)
    copies = tp_size // min(fewer) if fewer else 1
    shape = GridShape(tp=tp_size, etp=tp_size if has_experts else None, kv_copies=copies)
    return dataclasses.replace(spec, padded_vocab_size=rows), shape


def _sizes(spec: GptSpec) -> Iterator[tuple[str, int]]:
    """Yield the sizes that are split, each with its text."""
    for layer in spec.layers:
        mixer, mlp = layer.mixer, layer.mlp
        if isinstance(mixer, LinearAttentionSpec):
            yield f"{mixer.sizes.num_key_heads} linear attention heads", mixer.sizes.num_key_heads
        elif mixer is not None:
            yield f"{mixer.num_heads} attention heads", mixer.num_heads
        widths = [mlp] if not isinstance(mlp, ExpertsSpec) else [mlp.expert, mlp.shared]
        for one in widths:
            if one is not None:
                yield f"{one.ffn_hidden_size} channels of an MLP", one.ffn_hidden_size
