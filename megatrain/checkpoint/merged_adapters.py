"""A checkpoint with adapters (--lora-rank) as one without: W + alpha / rank * B A, box by box."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatrain.checkpoint.manifest import Manifest, StoredTensor
from megatrain.checkpoint.reader import TensorReader
from megatrain.config.model_spec.lora import adapter_names, is_adapter
from megatrain.optim.sharded import WEIGHT
from megatrain.parallel.layout import Box


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
        """See `TensorReader`."""
        return self._manifest

    def read_box(self, out: Tensor, *, kind: str, name: str, shape: tuple[int, ...], box: Box) -> None:
        """See `TensorReader`; the product is computed in fp64."""
        self._reader.read_box(out, kind=kind, name=name, shape=shape, box=box)
        name_a, name_b = adapter_names(name)
        if name_a not in self._reader.manifest.tensors:
            return
        whole, (rows, columns) = (0, self._rank), box
        a = self._part(name_a, (self._rank, shape[1]), (whole, columns))
        b = self._part(name_b, (shape[0], self._rank), (rows, whole))
        out.copy_(out.double() + self._scale * (b @ a))

    def _part(self, name: str, shape: tuple[int, int], box: Box) -> Tensor:
        values = torch.empty([stop - start for start, stop in box], dtype=torch.float64)
        self._reader.read_box(values, kind=WEIGHT, name=name, shape=shape, box=box)
        return values
