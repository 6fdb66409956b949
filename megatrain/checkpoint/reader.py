"""Read any box of any tensor of a checkpoint, independent of the layout that wrote it.

    requested box -> the chunks that overlap it -> read and compared with their checksums -> the overlap is copied

The last chunk stays in memory, because consecutive boxes are mostly in the same chunk.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from megatrain.checkpoint.disk import open_regular_file
from megatrain.checkpoint.errors import CheckpointError, DamagedError, MismatchError
from megatrain.checkpoint.manifest import DTYPES, Chunk, Manifest, StoredKind, StoredTensor, read_manifest
from megatrain.checkpoint.retention import hold
from megatrain.checkpoint.tensor_file import TensorFile, check_size
from megatrain.parallel.layout import Box, BoxRange, ParamLayout, box_shape, intersect


class CheckpointReader:
    """The tensors of the checkpoint in one folder, as a context manager: retention keeps the checkpoint while it is open.

    Raises:
        DamagedError: on opening or reading, if data differs from what was written.
        MismatchError: a requested tensor is missing or has another shape.
    """

    def __init__(self, path: Path, manifest: Manifest | None = None) -> None:
        self.path = path
        self._file: TensorFile | None = None
        self._last: tuple[Chunk, Tensor] | None = None
        self._hold = hold(path)
        try:
            self.manifest = manifest or read_manifest(path)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._last = None
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._hold is not None:
            self._hold.close()

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

    def read_box(self, out: Tensor, *, kind: str, name: str, shape: tuple[int, ...], box: Box) -> None:
        """Copy a box into `out`, which has the shape of the box and any float dtype."""
        stored = self.kind(name, shape, kind)
        for chunk in stored.chunks:
            common = intersect(chunk.box, box)
            if common:
                values = self.read_chunk(chunk, stored.dtype)
                out[_within(common, box)].copy_(values[_within(common, chunk.box)])

    def read_chunk(self, chunk: Chunk, dtype: str) -> Tensor:
        """Return the checked data of a chunk."""
        if self._last is not None and self._last[0] == chunk:
            return self._last[1]
        self._last = None  # frees the last chunk before the next is read
        file = self._open(chunk.file)
        shape = box_shape(chunk.box)
        values = file.read(
            chunk.key,
            dtype=dtype,
            shape=shape,
            crc32s=chunk.crc32s,
            block_bytes=self.manifest.block_bytes,
        ).view(shape)
        self._last = chunk, values
        return values

    def _open(self, name: str) -> TensorFile:
        path = self.path / name
        if self._file is None or self._file.path != path:
            if self._file is not None:
                self._file.close()
                self._file = None
            self._file = TensorFile(path, self.manifest.files[name])
        return self._file


@dataclass(frozen=True)
class CheckpointSource:
    """A TensorSource: one kind of state of a checkpoint."""

    reader: CheckpointReader
    kind: str

    def fill(self, out: Tensor, layout: ParamLayout, box: BoxRange) -> None:  # noqa: ARG002 (the piece has a name)
        """Read the box into `out`, which has its shape."""
        piece = box.piece
        self.reader.read_box(out, kind=self.kind, name=piece.name, shape=piece.shape, box=box.box)


def verify(path: Path, progress: Callable[[int], None] = lambda _: None) -> list[str]:
    """Return all problems of a checkpoint, each with its file; every byte is read. `progress` gets the bytes of each chunk."""
    try:
        reader = CheckpointReader(path)
    except CheckpointError as error:
        return [error.problems[0].text]
    problems: list[str] = []
    with reader:
        manifest = reader.manifest
        bad_files = set()
        for name, stored_file in manifest.files.items():
            try:
                with open_regular_file(path / name) as file:
                    check_size(path / name, file.seek(0, 2), stored_file)
                TensorFile(path / name, stored_file).close()
            except DamagedError as error:
                problems.append(error.problems[0].text)
                bad_files.add(name)
        for _, tensor in sorted(manifest.tensors.items()):
            for stored in tensor.kinds.values():
                for chunk in stored.chunks:
                    if chunk.file not in bad_files:
                        problems += _chunk_problem(reader, chunk, stored.dtype)
                    progress(math.prod(box_shape(chunk.box)) * DTYPES[stored.dtype].itemsize)
    found = {file.name for file in path.glob("*.safetensors")}
    problems += [
        f"{path / name}: not part of this checkpoint" for name in sorted(found - set(manifest.files))
    ]
    return problems


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
            box = tuple((0, size) for size in tensor.shape)
            reader.read_box(values, kind=kind, name=name, shape=tensor.shape, box=box)
            hashes[name] = hashlib.sha256(values.view(-1).view(torch.uint8).numpy().data).hexdigest()
    return hashes


def _chunk_problem(reader: CheckpointReader, chunk: Chunk, dtype: str) -> list[str]:
    try:
        reader.read_chunk(chunk, dtype)
    except DamagedError as error:
        return [error.problems[0].text]
    return []


def _within(common: Box, box: Box) -> tuple[slice, ...]:
    """Return the slices of `common` in a tensor with the data of `box`."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(common, box, strict=True))
