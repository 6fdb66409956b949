"""Read any box of any tensor of a checkpoint, independent of the layout that wrote it.

    requested boxes -> the chunks that overlap them -> parts of bounded size ─┬─> thread: read, verify the blocks, copy the overlap
                                                                              └─> thread: read, verify the blocks, copy the overlap

Only blocks with requested elements are read, rows of a chunk as a whole. A thread has a buffer of the largest chunk's size, at most
about 64 MiB; for a GPU, two on the host and two there: a thread reads the next part while the GPU checks the last one, in a stream of its own.
"""

from __future__ import annotations

import functools
import math
import os
import queue
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor

from megatrain.checkpoint.block_checksums import BLOCKS, BlockFormat
from megatrain.checkpoint.chunks import CHUNK_BYTES, split_box
from megatrain.checkpoint.errors import LOAD_FIX, CheckpointError, DamagedError, MismatchError
from megatrain.checkpoint.find import node_files
from megatrain.checkpoint.manifest import (
    DTYPES,
    Chunk,
    Manifest,
    StoredKind,
    read_root,
    tiling_problem,
)
from megatrain.checkpoint.parts import Parts, part_name, read_manifest
from megatrain.checkpoint.retention import hold
from megatrain.checkpoint.tensor_file import ReadBuffer, TensorFile, finish_checks
from megatrain.optim.sharded import WEIGHT
from megatrain.parallel.layout import (
    Box,
    BoxRange,
    ParamLayout,
    box_shape,
    intersect,
    slices_within,
    whole_box,
)

_MAX_THREADS = 8
_MAX_OPEN_FILES = 16


class TensorReader(Protocol):
    """Reads boxes of canonical tensors: of a checkpoint of ours, or of foreign weights."""

    path: Path

    @property
    def manifest(self) -> Manifest:
        """Counters, state, configuration, and the shape and dtype of each tensor."""

    def kind(self, name: str, shape: tuple[int, ...], kind: str) -> StoredKind:
        """Return one kind of state of a tensor.

        Raises:
            MismatchError: there is no such tensor, or it has another shape.
        """
        found, fix = self.manifest.tensors.get(name), LOAD_FIX
        if found is None:
            raise MismatchError(f"{self.path}: has no tensor {name}", fix=fix)
        if found.shape != shape:
            raise MismatchError(
                f"{self.path}: {name} has shape {list(found.shape)}, the model's has {list(shape)}", fix=fix
            )
        if kind not in found.kinds:
            raise MismatchError(
                f"{self.path}: has no {kind} of {name}", fix="load the weights alone (--no-load-optim)"
            )
        return found.kinds[kind]

    def read_box(self, out: Tensor, *, kind: str, name: str, shape: tuple[int, ...], box: Box) -> None:
        """Copy a box into `out`, which has the shape of the box and any float dtype."""

    def values(
        self,
        name: str,
        shape: tuple[int, ...],
        box: Box | None = None,
        *,
        kind: str = WEIGHT,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Return a box of a tensor in new memory; None: the whole tensor."""
        box = whole_box(shape) if box is None else box
        out = torch.empty(box_shape(box), dtype=dtype)
        self.read_box(out, kind=kind, name=name, shape=shape, box=box)
        return out

    def begin_box(self, out: Tensor, *, kind: str, name: str, shape: tuple[int, ...], box: Box) -> None:
        """Begin `read_box`, which `finish` ends; here it ends at once."""
        self.read_box(out, kind=kind, name=name, shape=shape, box=box)

    def finish(self) -> None:
        """End the boxes that were begun. Raises what `read_box` raises."""
        return

    def close(self) -> None:
        """Release files and threads; here there are none."""
        return


class CheckpointReader(TensorReader):
    """The tensors of the checkpoint in one folder, as a context manager: retention keeps the checkpoint while it is open.

    Args:
        manifest: as `find.check_folder` returned it; None: it is read.
        rank: this rank, which reads only the parts of the manifest that it needs, that of the same rank first; None: all are read.

    Raises:
        DamagedError: on opening or reading, if data differs from what was written.
        MismatchError: a requested tensor is missing or has another shape.
    """

    def __init__(self, path: Path, manifest: Manifest | None = None, *, rank: int | None = None) -> None:
        self.path = path
        self._files: dict[str, TensorFile] = {}
        self._lanes: dict[torch.device, queue.SimpleQueue[_Lane]] = {}
        self._copies: list[Future[None]] = []
        """Copies of parts that `finish` waits for."""
        self._pool = ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))))
        self._hold = hold(path)
        self._parts: Parts | None = None
        try:
            self._manifest = manifest or read_root(path)
            if rank is None and self._manifest.parts:
                self._manifest = read_manifest(path)
            if rank is not None and self._manifest.parts:
                self._parts = Parts(path, self._manifest)
                self._manifest = replace(self._manifest, files=self._parts.files, tensors=self._parts.tensors)
                self._parts.read([part_name(rank)] if part_name(rank) in self._manifest.parts else [])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()

    @property
    def manifest(self) -> Manifest:
        """Everything but tensor data; of parts, those that are read."""
        return self._manifest

    def kind(self, name: str, shape: tuple[int, ...], kind: str) -> StoredKind:
        """Return one kind of state of a tensor; of parts, the chunks in those that are read. Raises MismatchError."""
        tensors = self.manifest.tensors
        if self._parts is not None and (name not in tensors or kind not in tensors[name].kinds):
            for part in list(self._parts.with_tensor(name)):
                self._parts.read([part])
                if name in tensors and kind in tensors[name].kinds:
                    break
        return super().kind(name, shape, kind)

    def _overlapping(self, kind: str, name: str, shape: tuple[int, ...], box: Box) -> list[Chunk]:
        """Return the chunks with a part of a box; read the parts of the manifest that have them."""

        def found() -> list[Chunk]:
            return [chunk for chunk in self.kind(name, shape, kind).chunks if intersect(chunk.box, box)]

        if self._parts is None:
            return found()
        if self._gap(found(), box):
            self._parts.read(list(self._parts.with_tensor(name)))
        if problem := self._gap(found(), box):
            raise DamagedError(f"{self.path}: {name}: {kind}: {problem}")
        return found()

    @staticmethod
    def _gap(chunks: Sequence[Chunk], box: Box) -> str | None:
        """Return why chunks do not cover a box exactly once, or None if they do."""
        common = [found for chunk in chunks if (found := intersect(chunk.box, box))]
        corner = [start for start, _ in box]
        return tiling_problem(
            box_shape(box),
            [tuple((a - at, b - at) for (a, b), at in zip(one, corner, strict=True)) for one in common],
        )

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        try:
            self._wait_for_lanes()
        finally:
            self._lanes.clear()
            self._close_files()
            if self._hold is not None:
                self._hold.close()

    def read_box(self, out: Tensor, *, kind: str, name: str, shape: tuple[int, ...], box: Box) -> None:
        """Copy a box into `out`, which has the shape of the box and any float dtype; the caller's stream sees it from here on."""
        self.begin_box(out, kind=kind, name=name, shape=shape, box=box)
        self.finish()

    def begin_box(self, out: Tensor, *, kind: str, name: str, shape: tuple[int, ...], box: Box) -> None:
        """Begin `read_box`, which `finish` ends: threads read the parts of all boxes that were begun. `out` lives until then."""
        chunks = self._overlapping(kind, name, shape, box)
        stored = self.kind(name, shape, kind)
        lanes = self._lanes.setdefault(out.device, queue.SimpleQueue())
        caller = torch.cuda.current_stream(out.device) if out.device.type == "cuda" else None
        begun = None if caller is None else caller.record_event()
        num_bytes = self._buffer_bytes  # computed once, not by each thread

        def copy(file: TensorFile, chunk: Chunk, part: Box, common: Box) -> None:
            if caller is not None:
                torch.cuda.set_device(caller.device)  # a new thread has the first one
            try:
                lane = lanes.get_nowait()
            except queue.Empty:
                lane = self._new_lane(num_bytes, out.device, caller)
            try:
                with _in_stream(lane.stream):
                    if lane.stream is not None and begun is not None:
                        lane.stream.wait_event(begun)
                    values = self._read(file, chunk, stored.dtype, part, lane.next_buffer())
                    out[slices_within(common, box)].copy_(values[slices_within(common, part)])
            finally:
                lanes.put(lane)

        max_elements = CHUNK_BYTES // DTYPES[stored.dtype].itemsize
        for chunk in chunks:
            file = self._open(chunk.file)
            for part, common in _parts_to_read(chunk.box, box, max_elements):
                self._copies.append(self._pool.submit(copy, file, chunk, part, common))

    def finish(self) -> None:
        """End the boxes that were begun. Raises DamagedError if one does not match its checksums."""
        copies, self._copies = self._copies, []
        try:
            wait(copies, return_when=FIRST_EXCEPTION)
        finally:
            for each in copies:
                each.cancel()
            wait(copies)  # those that run write to memory of the caller
        errors = [error for each in copies if not each.cancelled() and (error := each.exception())]
        for buffers in self._wait_for_lanes():
            checks = [check for buffer in buffers for check in buffer.checks]
            for buffer in buffers:
                buffer.checks.clear()
            errors += finish_checks(checks)
        if errors:
            raise errors[0]

    def check_chunk(self, chunk: Chunk, dtype: str) -> None:
        """Read a chunk and check it."""
        self._read(self._open(chunk.file), chunk, dtype, chunk.box, None)

    def _read(
        self, file: TensorFile, chunk: Chunk, dtype: str, part: Box, buffer: ReadBuffer | None
    ) -> Tensor:
        """Return a part of a chunk that is contiguous in it; `buffer` is its memory."""
        shape, size = box_shape(chunk.box), math.prod(box_shape(part))
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        corner = (low - first for (low, _), (first, _) in zip(part, chunk.box, strict=True))
        start = sum(map(math.prod, zip(corner, strides, strict=True)))
        elements = slice(start, start + size)
        values = file.read(chunk, dtype, self.manifest.blocks, part=elements, buffer=buffer)
        return values.view(box_shape(part))

    def _wait_for_lanes(self) -> list[list[ReadBuffer]]:
        """Let the caller's stream wait for the streams of the lanes; return the buffers of each device."""
        found = []
        for device, lanes in self._lanes.items():
            found.append(buffers := list[ReadBuffer]())
            for _ in range(lanes.qsize()):
                lanes.put(lane := lanes.get())
                buffers += lane.buffers
                if lane.stream is not None:
                    torch.cuda.current_stream(device).wait_stream(lane.stream)
        return found

    def _new_lane(self, num_bytes: int, device: torch.device, caller: torch.cuda.Stream | None) -> _Lane:
        is_checked_there = checks_on_gpu(device, self.manifest.blocks)
        buffers = []
        with _in_stream(caller):  # the caller can use this memory after the load
            for _ in range(2 if is_checked_there else 1):
                host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=caller is not None)
                gpu = torch.empty(num_bytes, dtype=torch.uint8, device=device) if is_checked_there else None
                buffers.append(ReadBuffer(host, gpu))
        if caller is None:
            return _Lane(buffers, None)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(caller)  # which may still use the memory that the buffers got
        return _Lane(buffers, stream)

    @functools.cached_property
    def _buffer_bytes(self) -> int:
        """Size of whole blocks that hold any part: a chunk, or a part of a larger one and the rest of its first and last block."""
        block, largest = BLOCKS.num_bytes, 0 if self._parts is None else CHUNK_BYTES
        for tensor in self.manifest.tensors.values():
            for stored in tensor.kinds.values():
                elements = max((math.prod(box_shape(chunk.box)) for chunk in stored.chunks), default=0)
                largest = max(largest, elements * DTYPES[stored.dtype].itemsize)
        return -(-min(largest, CHUNK_BYTES + 2 * block) // block) * block

    def _open(self, name: str) -> TensorFile:
        """Return an open file; if many are open, first end the boxes that were begun, and close them."""
        if name not in self._files:
            if len(self._files) == _MAX_OPEN_FILES:
                self.finish()
                self._close_files()
            self._files[name] = TensorFile(self.path / name, self.manifest.files[name])
        return self._files[name]

    def _close_files(self) -> None:
        while self._files:
            self._files.popitem()[1].close()


@dataclass
class _Lane:
    """Memory and stream of one thread at a time; the buffers are used in turn."""

    buffers: list[ReadBuffer]
    """Two if a GPU checks what they hold, else one."""
    stream: torch.cuda.Stream | None
    """Stream of copies to a GPU and of checks there."""

    def next_buffer(self) -> ReadBuffer:
        self.buffers.append(self.buffers.pop(0))
        return self.buffers[-1]


@dataclass(frozen=True)
class CheckpointSource:
    """A TensorSource: one kind of state of a checkpoint."""

    reader: TensorReader
    kind: str

    def fill(self, out: Tensor, layout: ParamLayout, box: BoxRange) -> None:  # noqa: ARG002 (the piece has a name)
        """Begin to read the box into `out`, which has its shape; `reader.finish` ends it."""
        piece = box.piece
        self.reader.begin_box(out, kind=self.kind, name=piece.name, shape=piece.shape, box=box.box)


def _in_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Make a stream current; without one CUDA is not touched, as `torch.cuda.stream(None)` does."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def checks_on_gpu(device: torch.device, blocks: BlockFormat) -> bool:
    """Return whether what is read for a device is checked there: on a GPU, in the format that is written."""
    return device.type == "cuda" and blocks == BLOCKS


def verify(path: Path, progress: Callable[[int], None] = lambda _: None) -> list[str]:
    """Return all problems of a checkpoint, each with its file; every byte is read. `progress` gets the bytes of each chunk."""
    try:
        reader = CheckpointReader(path)
    except CheckpointError as error:
        return [error.problems[0].text]
    with reader:
        files = reader.manifest.files
        here = [name for name in node_files(path, reader.manifest) if name in files]  # parts are read
        problems = [text for _, text in find_damage(reader, here, progress)]
    found = {file.name for file in path.glob("*.safetensors")}
    problems += [f"{path / name}: not part of this checkpoint" for name in sorted(found - set(files))]
    return problems


def find_damage(
    reader: CheckpointReader, names: Collection[str], progress: Callable[[int], None] = lambda _: None
) -> Iterator[tuple[str, str]]:
    """Yield name and problem of damaged files among `names`; every byte of these is read. `progress` is as for `verify`."""
    manifest, intact = reader.manifest, set(names)
    for name in sorted(intact):
        try:
            TensorFile(reader.path / name, manifest.files[name]).close()
        except DamagedError as error:
            intact.remove(name)
            yield name, error.problems[0].text
    for _, tensor in sorted(manifest.tensors.items()):
        for stored in tensor.kinds.values():
            for chunk in stored.chunks:
                try:
                    if chunk.file in intact:
                        reader.check_chunk(chunk, stored.dtype)
                except DamagedError as error:
                    yield chunk.file, error.problems[0].text
                progress(math.prod(box_shape(chunk.box)) * DTYPES[stored.dtype].itemsize)


def _parts_to_read(chunk: Box, box: Box, max_elements: int) -> Iterator[tuple[Box, Box]]:
    """Yield parts that are contiguous in a chunk, and the overlap of each with `box`; together they cover the overlap."""
    for part in split_box(chunk, max_elements):
        common = intersect(part, box)
        if common is not None:
            # Rows before and after the overlap are left out, and so are blocks that hold nothing else.
            dim = next((dim for dim, (start, stop) in enumerate(part) if stop - start > 1), 0)
            yield (*part[:dim], common[dim], *part[dim + 1 :]), common
