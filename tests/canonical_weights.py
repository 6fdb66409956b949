"""Whole tensors by canonical name: the source of a model's weights, and what a checkpoint has of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatrain.checkpoint.manifest import DTYPES
from megatrain.checkpoint.reader import CheckpointReader
from megatrain.parallel.layout import BoxRange, ParamLayout, whole_box


class CopiedWeights:
    """Weights of another program; a `TensorSource`. `unused` has the names that no box was copied from."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights
        self.unused = set(weights)

    def fill(self, out: Tensor, layout: ParamLayout, box: BoxRange) -> None:
        whole = self.weights[box.piece.name]
        assert whole.shape == box.piece.shape, box.piece.name
        out.copy_(whole[tuple(slice(*edge) for edge in box.box)])
        self.unused.discard(box.piece.name)


def hash_tensors(path: Path, kind: str = "weight") -> dict[str, str]:
    """Return the SHA-256 of each tensor's data of this kind, in row-major order: independent of the layout that wrote it.

    One tensor is in memory at a time.
    """
    hashes: dict[str, str] = {}
    with CheckpointReader(path) as reader:
        for name, tensor in sorted(reader.manifest.tensors.items()):
            if kind not in tensor.kinds:
                continue
            stored = tensor.kinds[kind]
            values = torch.empty(tensor.shape, dtype=DTYPES[stored.dtype])
            reader.read_box(values, kind=kind, name=name, shape=tensor.shape, box=whole_box(tensor.shape))
            hashes[name] = hashlib.sha256(values.view(-1).view(torch.uint8).numpy().data).hexdigest()
    return hashes
