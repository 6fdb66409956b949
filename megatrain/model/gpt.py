"""The model: a spec becomes this rank's list of segments and the registry of its parameters.

stage 0                stage 1 .. p - 2       stage p - 1
embedding, layers      layers                 layers, head
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatrain.kernels.elementwise import rotary_tables
from megatrain.model.head import Head
from megatrain.model.implementations.local import LocalLeaves
from megatrain.model.layer import RotaryTables, TransformerLayer, rotary_dtype
from megatrain.model.layouts import norm_layout, vocab_layout
from megatrain.model.specs import GptSpec
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.layout import Init, LaidOutModule, ParamLayout, ParamRegistry
from megatrain.parallel.tensor import TensorParallel, vocab_embedding

EMBEDDING_NAME = "embedding.word_embeddings.weight"
OUTPUT_NAME = "output_layer.weight"


@dataclass(frozen=True)
class Model:
    """This rank's part of the model. Its parameters have no memory before `FlatBuffers` gives it to them."""

    spec: GptSpec
    segments: list[nn.Module]
    registry: ParamRegistry
    tp: TensorParallel


class Embedding(LaidOutModule):
    """The first segment: token ids [b, s] -> [s/tp, b, h]."""

    weight: Tensor

    def __init__(self, layout: ParamLayout, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.tp = tp
        self.add_weight("weight", layout, dtype)

    def forward(self, hidden: Tensor | None, batch: Batch, info: PassInfo) -> Tensor:  # noqa: ARG002 (a segment gets it)
        return vocab_embedding(batch.tokens.t(), self.weight, self.weight_grads.get("weight"), self.tp, info)


class OutputWeight(LaidOutModule):
    """The head's own weight, where it is not the embedding's."""

    weight: Tensor

    def __init__(self, layout: ParamLayout, dtype: torch.dtype) -> None:
        super().__init__()
        self.add_weight("weight", layout, dtype)


class HeadSegment(nn.Module):
    """The head with its own output weight beside it."""

    def __init__(self, output: OutputWeight, head: Head) -> None:
        super().__init__()
        self.output = output
        self.head = head

    def forward(self, hidden: Tensor, batch: Batch, info: PassInfo) -> Tensor:
        loss: Tensor = self.head(hidden, batch, info)
        return loss

    def logits(self, hidden: Tensor, info: PassInfo) -> Tensor:
        return self.head.logits(hidden, info)


def stage_layers(num_layers: int, stage: int, num_stages: int) -> range:
    """Global numbers of a pipeline stage's layers."""
    per_stage = num_layers // num_stages
    return range(stage * per_stage, (stage + 1) * per_stage)


def build_model(
    spec: GptSpec,
    grid: RankGrid,
    *,
    seq_length: int,
    sequence_parallel: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Model:
    """This rank's part of the model that `spec` describes.

    Args:
        seq_length: longest sequence; positions are tabulated up to it.
        dtype: of the weights and of the computation.
        device: of the position tables (weights have no memory yet).
    """
    tp = TensorParallel(grid.tp, sequence_parallel)
    leaves = LocalLeaves(tp, dtype, spec.norm_epsilon)
    tables = _RotaryCache(seq_length, dtype, device)
    segments: list[nn.Module] = []
    if grid.pp.is_first:
        segments.append(Embedding(_vocab(spec, EMBEDDING_NAME, grid, tp), tp, dtype))
    for number in stage_layers(len(spec.layers), grid.pp.rank, grid.pp.size):
        layer = spec.layers[number]
        rotary = tables.of(layer.mixer.head_channels, layer.mixer.rotary_base)
        segments.append(TransformerLayer(layer, spec, number, leaves, tp, rotary))
    if grid.pp.is_last:
        segments.append(_head(spec, grid, tp, dtype, segments[0]))
    return Model(spec, segments, ParamRegistry.of(segments), tp)


def _head(
    spec: GptSpec, grid: RankGrid, tp: TensorParallel, dtype: torch.dtype, first: nn.Module
) -> nn.Module:
    norm = norm_layout("decoder.final_norm.weight", spec.hidden_size, tp)
    if spec.is_tied and grid.pp.is_first:
        assert isinstance(first, Embedding)
        return Head(norm, first, eps=spec.norm_epsilon, vocab_size=spec.vocab_size, tp=tp, dtype=dtype)
    name = EMBEDDING_NAME if spec.is_tied else OUTPUT_NAME
    output = OutputWeight(_vocab(spec, name, grid, tp), dtype)
    return HeadSegment(
        output, Head(norm, output, eps=spec.norm_epsilon, vocab_size=spec.vocab_size, tp=tp, dtype=dtype)
    )


def _vocab(spec: GptSpec, name: str, grid: RankGrid, tp: TensorParallel) -> ParamLayout:
    is_shared = spec.is_tied and grid.pp.size > 1
    init = Init(std=spec.init_std)
    return vocab_layout(
        name, spec.vocab_size, spec.padded_vocab_size, spec.hidden_size, init, tp, is_shared=is_shared
    )


class _RotaryCache:
    """Tables that layers share."""

    def __init__(self, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self.length, self.dtype, self.device = length, rotary_dtype(dtype), device
        self.tables: dict[tuple[int, float], RotaryTables] = {}

    def of(self, channels: int, base: float | None) -> RotaryTables | None:
        if base is None:
            return None
        if (channels, base) not in self.tables:
            made = rotary_tables(self.length, channels, base, dtype=self.dtype, device=self.device)
            self.tables[channels, base] = made
        return self.tables[channels, base]
