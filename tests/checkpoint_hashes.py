"""Hashes of the tensors of a checkpoint, equal for every layout that wrote it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from megatrain.checkpoint.manifest import DTYPES
from megatrain.checkpoint.reader import CheckpointReader
from megatrain.parallel.layout import whole_box


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
