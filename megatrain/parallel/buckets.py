"""Buckets: how a model chunk's parameters are cut into flat tensors, and which shard of each this rank owns.

    segment 0   | segment 1              | segment 2 ...       a bucket is reduced and all-gathered at once
    bucket 0    | bucket 1               | bucket 2
    shard 0 | 1 | shard 0    | shard 1   | ...                 a rank's optimizer owns its shard of every bucket

Within a bucket, parameters that the optimizer treats alike are contiguous, so that it works on few ranges.
A tied embedding has a bucket of its own, cut into the same shards on the first and the last pipeline stage; a segment's
experts have one too, since they are sharded over other ranks than its dense layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatrain.kernels.linear import FirstWrite
from megatrain.parallel.grid import RankGrid, RankGroup
from megatrain.parallel.layout import BoxRange, ParamEntry, ParamRegistry, Piece
from megatrain.parallel.rank_lists import Family

FirstWrites = Sequence[tuple[FirstWrite, slice]]
"""Parts of a bucket of gradients that layers may overwrite, in their order."""
_ALIGNMENT = 64
"""Elements; every parameter and every shard starts at a multiple, so that kernels can use their widest loads."""


@dataclass(frozen=True)
class BucketParam:
    """A parameter and its first element in its bucket."""

    entry: ParamEntry
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.entry.layout.numel


@dataclass(frozen=True)
class Bucket:
    """Parameters in one flat tensor: of a segment and a family, or a tied embedding."""

    users: tuple[int, ...]
    """Segments that use them: one, or more for a tied embedding."""
    family: Family
    size: int
    """Elements, with alignment."""
    params: tuple[BucketParam, ...]

    @property
    def is_trained(self) -> bool:
        """False: its parameters are frozen; it has neither gradients nor optimizer state."""
        return self.params[0].entry.layout.is_trained

    @property
    def completed_by(self) -> int | None:
        """The segment whose backward pass completes its gradients; None: it has none."""
        return self.users[0] if self.is_trained else None

    @property
    def num_in_matrices(self) -> int:
        """Elements of the matrices, which come first, with alignment."""
        others = (param.start for param in self.params if not param.entry.layout.group.is_matrix)
        return next(others, self.size)


@dataclass(frozen=True)
class Shard:
    """The part of a bucket that this rank's optimizer owns: elements `start` to `stop`."""

    bucket: Bucket
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def parts(self) -> Iterator[tuple[BucketParam, slice]]:
        """Yield every parameter with elements in this shard, and their range counted from the shard's start."""
        for param in self.bucket.params:
            low, high = max(self.start, param.start), min(self.stop, param.stop)
            if low < high:
                yield param, slice(low - self.start, high - self.start)

    def pieces(self) -> Iterator[tuple[Piece, slice]]:
        """Yield every piece with elements in this shard, and their range counted from the shard's start."""
        for param, part in self.parts():
            layout = param.entry.layout
            first = self.start + part.start - param.start
            for piece, own in layout.piece_ranges(first, first + part.stop - part.start):
                start = param.start - self.start + piece.row * math.prod(layout.shape[1:])
                yield piece, slice(start + own.start, start + own.stop)

    def owned(self) -> Iterator[tuple[BucketParam, BoxRange, slice]]:
        """Yield every box in this shard, with its parameter and its range counted from the shard's start."""
        for param, part in self.parts():
            first = self.start + part.start - param.start
            for box in param.entry.layout.ranges(first, first + part.stop - part.start):
                start = part.start + box.offset
                yield param, box, slice(start, start + box.numel)


def cut_buckets(registry: ParamRegistry, grid: RankGrid) -> list[Bucket]:
    """Cut a model chunk's parameters into buckets that divide evenly over the ranks that shard them."""
    buckets: list[Bucket] = []
    for entries in _grouped(registry):
        params, at = [], 0
        for entry in entries:
            params.append(BucketParam(entry, at))
            at = _aligned(at + entry.layout.numel, _ALIGNMENT)
        family = entries[0].layout.family
        size = _aligned(at, _ALIGNMENT * grid.family(family).shard.size)
        users = sorted({user for entry in entries for user in entry.users})
        buckets.append(Bucket(tuple(users), family, size, tuple(params)))
    return buckets


def local_shard(bucket: Bucket, shard_group: RankGroup) -> Shard:
    """Return this rank's shard of a bucket."""
    size = bucket.size // shard_group.size
    return Shard(bucket, shard_group.rank * size, (shard_group.rank + 1) * size)


def _grouped(registry: ParamRegistry) -> list[list[ParamEntry]]:
    """Return the parameters of each bucket, in order. Those of a group of stages are apart: its ranks shard them alike."""
    groups: dict[tuple[int, bool, tuple[str, ...], Family, bool], list[ParamEntry]] = {}
    for entry in registry.entries.values():
        layout, stages = entry.layout, tuple(sorted(entry.stage_groups))
        key = entry.segment, entry.is_shared, stages, layout.family, layout.is_trained
        groups.setdefault(key, []).append(entry)
    return [sorted(groups[key], key=lambda entry: entry.layout.group, reverse=True) for key in sorted(groups)]


def _aligned(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def parts_between(parts: Sequence[slice], size: int) -> list[slice]:
    """Return the parts of a bucket of `size` elements that are in none of these, which are in their order."""
    stops, starts = [0, *(part.stop for part in parts)], [*(part.start for part in parts), size]
    return [slice(stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start]
