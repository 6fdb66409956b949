"""The chunks that each rank writes: every box of the model's state exactly once, and equally much on ranks with copies.

    box with copies on other ranks (a norm's weight under tp)  -> cut into blocks of rows; each block has one writer among them
    shard with copies on other replicas (without ZeRO)         -> cut into chunks, dealt to these replicas
    all that is left to this rank                              -> chunks of bounded size -> files

No rank asks another: the writer of a block follows from its canonical name and place, and replicas with equal shards have
equal lists of chunks.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatrain.checkpoint.shard_file import ChunkEntry
from megatrain.checkpoint.tensor_file import dtype_name
from megatrain.optim.sharded import ShardedOptimizer
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.layout import Box, BoxRange, box_shape
from megatrain.parallel.rank_lists import Family

CHUNK_BYTES = 64 << 20
"""Largest chunk."""
FILE_BYTES = 4 << 30
"""A file gets no more chunks once it has this size."""
_BLOCK_BYTES = 4 << 20
"""Size of the blocks of rows that ranks with copies share, at least a row."""
_CHUNKS_PER_REPLICA = 8
"""Replicas with copies of a shard cut it into about this many chunks each, so that they write equally much."""
_MIN_CHUNK_BYTES = 1 << 20
"""Replicas do not cut smaller chunks to share them."""


@dataclass(frozen=True)
class PlannedChunk:
    """A part of this rank's state, to be written as one chunk."""

    name: str
    shape: tuple[int, ...]
    kind: str
    box: Box
    values: Tensor

    @property
    def key(self) -> str:
        return chunk_key(self.kind, self.name, self.box)

    @property
    def num_bytes(self) -> int:
        return self.values.numel() * self.values.element_size()

    @property
    def entry(self) -> ChunkEntry:
        """Entry in the header of a file."""
        return ChunkEntry(self.key, dtype_name(self.values.dtype), box_shape(self.box), self.num_bytes)


def plan_chunks(
    optimizer: ShardedOptimizer,
    grid: RankGrid,
    kinds: Sequence[str] | None = None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> list[PlannedChunk]:
    """Return the chunks that this rank writes."""
    held: dict[Family, list[PlannedChunk]] = {}
    for kind in kinds or optimizer.kinds:
        for layout, box, values in optimizer.owned(kind):
            held.setdefault(layout.family, []).extend(_own_blocks(kind, box, values, grid))
    plan: list[PlannedChunk] = []
    for family, boxes in held.items():
        replicas = grid.family(family).copies
        largest = chunk_bytes
        if replicas.size > 1:
            even = sum(box.num_bytes for box in boxes) // (_CHUNKS_PER_REPLICA * replicas.size)
            largest = min(chunk_bytes, max(even, _MIN_CHUNK_BYTES))
        plan += _dealt((part for box in boxes for part in _split(box, largest)), replicas.rank, replicas.size)
    return plan


def split_into_files(
    plan: Sequence[PlannedChunk], rank: int, file_bytes: int = FILE_BYTES
) -> Iterator[tuple[str, list[PlannedChunk]]]:
    """Yield the name and the chunks of each file of a rank; a file gets no more chunks once it has `file_bytes`."""
    part: list[PlannedChunk] = []
    num_bytes = number = 0
    for position, chunk in enumerate(plan, start=1):
        part.append(chunk)
        num_bytes += chunk.num_bytes
        if num_bytes >= file_bytes or position == len(plan):
            yield f"shard_{rank:05d}{f'_{number}' if number else ''}.safetensors", part
            part, num_bytes, number = [], 0, number + 1


def chunk_key(kind: str, name: str, box: Box) -> str:
    """Return the name of a chunk in its file, such as `weight/embedding.weight/0-64,0-32`."""
    return f"{kind}/{name}/" + ",".join(f"{start}-{stop}" for start, stop in box)


def split_box(box: Box, max_elements: int) -> Iterator[Box]:
    """Yield boxes of at most `max_elements` that cover `box`, each contiguous in it, in row-major order."""
    (start, stop), rest = box[0], box[1:]
    row_size = math.prod(box_shape(rest))
    if row_size > max_elements:
        for row in range(start, stop):
            for inner in split_box(rest, max_elements):
                yield ((row, row + 1), *inner)
        return
    step = max_elements // row_size
    for first in range(start, stop, step):
        yield ((first, min(first + step, stop)), *rest)


def _own_blocks(kind: str, box: BoxRange, values: Tensor, grid: RankGrid) -> Iterator[PlannedChunk]:
    """Yield the parts of a box that this rank writes and not one of the ranks of `box.piece.copies`.

    Rows are numbered in the canonical tensor, because ranks with copies of a piece may shard it differently.
    """
    piece = box.piece
    index, num_ranks = grid.index_in(piece.copies)
    if num_ranks == 1:
        yield PlannedChunk(piece.name, piece.shape, kind, box.box, values)
        return
    row_bytes = math.prod(piece.shape[1:]) * values.element_size()
    num_rows, first = max(_BLOCK_BYTES // row_bytes, 1), zlib.crc32(f"{kind}/{piece.name}".encode())
    (start, stop), rest = box.box[0], box.box[1:]
    row_size = math.prod(box_shape(rest))
    for block in range(start // num_rows, -(-stop // num_rows)):
        low, high = max(start, block * num_rows), min(stop, (block + 1) * num_rows)
        if (first + block) % num_ranks == index:
            own = values[(low - start) * row_size : (high - start) * row_size]
            yield PlannedChunk(piece.name, piece.shape, kind, ((low, high), *rest), own)


def _dealt(chunks: Iterable[PlannedChunk], index: int, num_ranks: int) -> Iterator[PlannedChunk]:
    """Yield the chunks of one of several ranks: each chunk goes to the rank with the fewest bytes so far."""
    loads = [(0, rank) for rank in range(num_ranks)]
    for chunk in chunks:
        num_bytes, rank = loads[0]
        heapq.heapreplace(loads, (num_bytes + chunk.num_bytes, rank))
        if rank == index:
            yield chunk


def _split(chunk: PlannedChunk, chunk_bytes: int) -> Iterator[PlannedChunk]:
    """Yield chunks of bounded size that cover `chunk`, in row-major order."""
    at, max_elements = 0, chunk_bytes // chunk.values.element_size()
    for part in split_box(chunk.box, max_elements):
        size = math.prod(box_shape(part))
        yield PlannedChunk(chunk.name, chunk.shape, chunk.kind, part, chunk.values[at : at + size])
        at += size
