"""Parts of all subcommands of `megatrain checkpoint`: choosing a checkpoint, reading it chunk by chunk, progress, units."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from megatrain.checkpoint.find import (
    OF_MEGATRON,
    base_folder,
    find_checkpoints,
    newest_of_megatron,
    newest_valid,
)
from megatrain.checkpoint.manifest import DTYPES, Manifest
from megatrain.checkpoint.reader import CheckpointReader, TensorReader
from megatrain.config.errors import InputError, MegatrainError, NoCheckpointError
from megatrain.parallel.layout import Box, box_shape
from megatrain.training.logging.console import Console


@contextmanager
def opened(path: Path) -> Iterator[CheckpointReader]:
    """Open the newest valid checkpoint in the folder `path`, or the one of FOLDER/iter_0000100.

    Raises:
        NoCheckpointError: there is none.
    """
    found = newest_valid(path)
    if found is None:
        raise no_checkpoint(path)
    with CheckpointReader(found.path) as reader:
        yield reader


def no_checkpoint(path: Path) -> MegatrainError:
    """Return the error for a path without a valid checkpoint."""
    if not path.exists():
        return InputError(f"{path} does not exist", fix="name the --save folder of a run")
    found = find_checkpoints(path)
    if newest_of_megatron(path) is not None and all(one.problem == OF_MEGATRON for one in found):
        return NoCheckpointError(
            f"{path} has {OF_MEGATRON}",
            fix=f"convert it first: megatrain convert megatron-to-megatrain {path} TARGET",
        )
    reasons = "".join(f"\n  {one.path}: {one.problem}" for one in found)
    return NoCheckpointError(
        f"{path} has no valid checkpoint{reasons}",
        fix=f"name the --save folder of a run, or one of its iter_NNNNNNN folders; `megatrain checkpoint ls {base_folder(path)}`"
        " lists them",
    )


@dataclass(frozen=True)
class TensorPart:
    """A chunk of one kind of state of a tensor: the unit that is in memory at a time."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    """Name of the dtype in safetensors."""
    box: Box

    @property
    def num_bytes(self) -> int:
        return num_bytes_of(box_shape(self.box), self.dtype)

    def stored_bytes(self, reader: TensorReader) -> int:
        """Return its bytes in the dtype that `reader` has."""
        return num_bytes_of(box_shape(self.box), reader.kind(self.name, self.shape, self.kind).dtype)

    def read(self, reader: TensorReader, buffer: Tensor | None = None) -> Tensor:
        """Return the checked values of this box; they may be of another checkpoint with the same tensor.

        Args:
            buffer: memory for `stored_bytes` or more; None: new memory.
        """
        dtype = DTYPES[reader.kind(self.name, self.shape, self.kind).dtype]
        memory = torch.empty(self.stored_bytes(reader), dtype=torch.uint8) if buffer is None else buffer
        values = memory[: self.stored_bytes(reader)].view(dtype).view(box_shape(self.box))
        reader.read_box(values, kind=self.kind, name=self.name, shape=self.shape, box=self.box)
        return values


def parts_of(manifest: Manifest) -> Iterator[TensorPart]:
    """Yield the chunks of all tensors, by name and kind."""
    for name, tensor in sorted(manifest.tensors.items()):
        for kind, stored in tensor.kinds.items():
            for chunk in stored.chunks:
                yield TensorPart(name, kind, tensor.shape, stored.dtype, chunk.box)


def num_bytes_of(shape: tuple[int, ...], dtype: str) -> int:
    """Return the bytes of a tensor; `dtype` is its name in safetensors."""
    return int(torch.Size(shape).numel()) * DTYPES[dtype].itemsize


class Progress:
    """A progress bar over bytes, on a terminal."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, max(total, 1), 0
        self._console = Console()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._console.remove_bar()

    def add(self, num_bytes: int) -> None:
        """Count bytes that were read or written."""
        self._done += num_bytes
        status = f"{self._what}, {size_text(self._done)} of {size_text(self._total)}"
        self._console.show_bar(done=100 * self._done // self._total, total=100, status=status)


def size_text(num_bytes: int) -> str:
    """Format a number of bytes: `1.5 GB`."""
    size, units = float(num_bytes), ("bytes", "kB", "MB", "GB", "TB")
    for unit in units:
        if size < 1000 or unit == units[-1]:
            break
        size /= 1000
    return f"{num_bytes} bytes" if unit == "bytes" else f"{size:.3g} {unit}"
