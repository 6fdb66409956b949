"""The part of a checkpoint's reader that loading uses, whatever program wrote the checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from torch import Tensor

from megatrain.checkpoint.errors import MismatchError
from megatrain.checkpoint.manifest import Manifest, StoredKind, StoredTensor
from megatrain.parallel.layout import Box, BoxRange, ParamLayout


class TensorReader(ABC):
    """The canonical tensors of a checkpoint, as a context manager.

    Raises:
        DamagedError: on opening or reading, if data differs from what was written.
        MismatchError: a requested tensor is missing or has another shape.
    """

    path: Path

    @property
    @abstractmethod
    def manifest(self) -> Manifest:
        """Counters, state, configuration, and the shape and dtype of each tensor."""

    @abstractmethod
    def read_box(self, out: Tensor, *, kind: str, name: str, shape: tuple[int, ...], box: Box) -> None:
        """Copy a box into `out`, which has the shape of the box and any float dtype."""

    def close(self) -> None:
        """Close the files."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def source(self, kind: str) -> CheckpointSource:
        """Return the source of one kind of optimizer state, for `fill_shards`."""
        return CheckpointSource(self, kind)

    def tensor(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Return the entry of a tensor of this shape."""
        found = self.manifest.tensors.get(name)
        if found is None:
            raise MismatchError(
                f"{self.path}: has no tensor {name}", fix="load it into the model that it was saved from"
            )
        if found.shape != shape:
            raise MismatchError(
                f"{self.path}: {name} has shape {list(found.shape)}, the model's has {list(shape)}",
                fix="load it into the model that it was saved from",
            )
        return found

    def kind(self, name: str, shape: tuple[int, ...], kind: str) -> StoredKind:
        """Return the chunks of one kind of state of a tensor."""
        found = self.tensor(name, shape).kinds.get(kind)
        if found is None:
            raise MismatchError(
                f"{self.path}: has no {kind} of {name}", fix="load the weights alone (--no-load-optim)"
            )
        return found


@dataclass(frozen=True)
class CheckpointSource:
    """A TensorSource: one kind of state of a checkpoint."""

    reader: TensorReader
    kind: str

    def fill(self, out: Tensor, layout: ParamLayout, box: BoxRange) -> None:  # noqa: ARG002 (the piece has a name)
        """Read the box into `out`, which has its shape."""
        piece = box.piece
        self.reader.read_box(out, kind=self.kind, name=piece.name, shape=piece.shape, box=box.box)
