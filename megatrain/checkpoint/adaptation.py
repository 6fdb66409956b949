"""Adaptation: initial weights of a run from a checkpoint of a model that differs in what `--finetune` may change.

output_layer [v, h], untied         <─ the embedding
biases that the checkpoint lacks    <─ 0
projections of a distillation       <─ initial values; left out, if the model has none
adapters that the checkpoint lacks  <─ initial values
rows of new tokens                  <─ initial values, in rows that were padding
layers of multi-token prediction    ─> left out, if the model has fewer
all else                            <─ the same tensor

`merged` does the reverse for adapters (--lora-rank): it reads W + alpha / rank * B A, box by box.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatrain.checkpoint.manifest import OF_TRAINING, Manifest, StoredTensor
from megatrain.checkpoint.reader import CheckpointSource, TensorReader
from megatrain.checkpoint.upcycling import UpcycledSource, Upcycling
from megatrain.config.model_spec.lora import adapter_names, is_adapter
from megatrain.model.gpt import EMBEDDING_NAME, OUTPUT_NAME
from megatrain.optim.sharded import WEIGHT
from megatrain.parallel.initialize import InitialWeights
from megatrain.parallel.layout import Box, BoxRange, ParamLayout, Piece

_MTP = "mtp."


@dataclass(frozen=True)
class Adaptation:
    """Changes of the model whose weights a run starts with."""

    upcycling: Upcycling | None
    """The checkpoint is of a dense model, and experts become copies of its MLP; None: it is not."""
    unties_head: bool
    adds_biases: bool
    drops_mtp: bool
    max_tokens: int
    """Rows of the checkpoint's vocabulary, padding included: as many tokens may be used."""
    seed: int
    """Seed of initial values."""

    def stored(self, piece: Piece, tensors: Mapping[str, StoredTensor]) -> Piece | None:
        """Return the checkpoint's tensor with the values of a piece; None: there is none."""
        dense = piece if self.upcycling is None else self.upcycling.stored(piece)
        return None if dense is None else self.origin(dense, tensors)

    def source(self, source: CheckpointSource) -> AdaptedSource | UpcycledSource:
        """Return the source of the run's weights."""
        adapted = AdaptedSource(source, self)
        return adapted if self.upcycling is None else UpcycledSource(adapted, source.reader, self.upcycling)

    def origin(self, piece: Piece, tensors: Mapping[str, StoredTensor]) -> Piece | None:
        """Return the checkpoint's tensor with the values of a piece that is not upcycled; None: it has none."""
        name = EMBEDDING_NAME if self.unties_head and piece.name == OUTPUT_NAME else piece.name
        found = tensors.get(name)
        if found is None and self.adds_biases and name.endswith(".bias"):
            return None
        if found is None and is_adapter(name):
            return None
        if name.startswith(OF_TRAINING) and (found is None or found.shape != piece.shape):
            return None
        if found is not None and name in (EMBEDDING_NAME, OUTPUT_NAME):
            rows = found.shape[0]
            if rows < piece.shape[0] <= self.max_tokens:
                return replace(piece, name=name, shape=(rows, *piece.shape[1:]))
        return replace(piece, name=name)

    def unused(self, names: Collection[str]) -> list[str]:
        """Return the names of the checkpoint's unused tensors that the model should have."""
        return [name for name in names if not (self.drops_mtp and name.startswith(_MTP))]


@dataclass(frozen=True)
class AdaptedSource:
    """A TensorSource: the weights of a checkpoint, adapted."""

    source: CheckpointSource
    adaptation: Adaptation

    def fill(self, out: Tensor, layout: ParamLayout, box: BoxRange) -> None:
        """Begin to read the box into `out`, which has its shape; `reader.finish` ends it."""
        piece = self.adaptation.origin(box.piece, self.source.reader.manifest.tensors)
        if piece is None:
            self._fill_new(out, layout, box)
            return
        (first, stop), *others = box.box
        known = min(max(piece.shape[0] - first, 0), stop - first)  # rows
        if known:
            rows = (first, first + known)
            self.source.fill(out[:known], layout, BoxRange(piece, (rows, *others), 0))
        if first + known < stop:
            rows = (first + known, stop)
            initial = InitialWeights(self.adaptation.seed)
            initial.fill(out[known:], layout, BoxRange(box.piece, (rows, *others), 0))

    def _fill_new(self, out: Tensor, layout: ParamLayout, box: BoxRange) -> None:
        """Fill a tensor that the checkpoint lacks: biases are 0, tensors of a training alone and adapters are drawn."""
        if box.piece.name.startswith(OF_TRAINING) or is_adapter(box.piece.name):
            InitialWeights(self.adaptation.seed).fill(out, layout, box)
        else:
            out.zero_()


def merged(reader: TensorReader) -> TensorReader:
    """Return a reader of weights into which the adapters of a checkpoint are merged; one without adapters is returned itself."""
    return MergedAdapters(reader) if any(map(is_adapter, reader.manifest.tensors)) else reader


class MergedAdapters(TensorReader):
    """The merged weights of a checkpoint with adapters; there is no optimizer state."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader, self.path = reader, reader.path
        stored = reader.manifest
        adapters = stored.config["adapters"]
        self._rank: int = adapters["lora_rank"]
        self._scale: float = adapters["lora_alpha"] / self._rank
        self._manifest = replace(
            stored,
            optimizer_step_count=0,
            state={**stored.state, "has_optimizer": False},
            config={**stored.config, "adapters": {**adapters, "lora_rank": None}},
            tensors={
                name: StoredTensor(tensor.shape, {WEIGHT: tensor.kinds[WEIGHT]})
                for name, tensor in stored.tensors.items()
                if not is_adapter(name)
            },
        )

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def read_box(self, out: Tensor, *, kind: str, name: str, shape: tuple[int, ...], box: Box) -> None:
        """See `TensorReader`; the product is computed in fp64."""
        self._reader.read_box(out, kind=kind, name=name, shape=shape, box=box)
        name_a, name_b = adapter_names(name)
        if name_a not in self._reader.manifest.tensors:
            return
        whole, (rows, columns) = (0, self._rank), box
        read = functools.partial(self._reader.values, dtype=torch.float64)
        a = read(name_a, (self._rank, shape[1]), (whole, columns))
        b = read(name_b, (shape[0], self._rank), (rows, whole))
        out.copy_(out.double() + self._scale * (b @ a))
