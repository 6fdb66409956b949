"""Flat buffers: the weights of this rank's model chunk in a tensor a bucket, their gradients in others, place for place.

    segment 0   | segment 1              | segment 2 ...       a bucket is what is reduced and gathered at once
    bucket 0    | bucket 1               | bucket 2
    shard 0 | 1 | shard 0    | shard 1   | ...                 a rank's optimizer owns its shard of every bucket

A parameter is a view of a bucket's weights. Gradients of linear layers are accumulated straight into its
gradients. Within a bucket, parameters that the optimizer treats alike stand together, so that it works on few ranges.
A tied embedding has a bucket of its own, with shards that lie alike on the first and the last pipeline stage; so have
a segment's experts, whose shards lie on other ranks than those of its dense layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatrain.parallel.data_parallel import BucketMemory
from megatrain.parallel.grid import RankGrid, RankGroup
from megatrain.parallel.layout import BoxRange, ParamEntry, ParamRegistry, Piece
from megatrain.parallel.rank_lists import Family

_ALIGNMENT = 64
"""Elements; every parameter and every shard starts at a multiple, so that kernels may use their widest loads."""


@dataclass(frozen=True)
class Placed:
    """A parameter and where it begins in its bucket."""

    entry: ParamEntry
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.entry.layout.numel


@dataclass(frozen=True)
class Bucket:
    """Parameters that lie in one tensor: those of a segment that belong to one family, or a tied embedding."""

    users: tuple[int, ...]
    """Segments that work with them: one, or more with a tied embedding."""
    family: Family
    size: int
    """Elements, with what aligns them."""
    placed: tuple[Placed, ...]

    @property
    def num_in_matrices(self) -> int:
        """Elements of the matrices, which stand first, with what aligns them."""
        others = (placed.start for placed in self.placed if not placed.entry.layout.group.is_matrix)
        return next(others, self.size)


@dataclass(frozen=True)
class Shard:
    """The part of a bucket that this rank's optimizer owns: its elements `start` to `stop`."""

    bucket: Bucket
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def parts(self) -> Iterator[tuple[Placed, slice]]:
        """Every parameter that has elements in this shard, with their place counted from the shard's start."""
        for placed in self.bucket.placed:
            low, high = max(self.start, placed.start), min(self.stop, placed.stop)
            if low < high:
                yield placed, slice(low - self.start, high - self.start)

    def pieces(self) -> Iterator[tuple[Piece, slice]]:
        """Every piece that has elements in this shard, with their place counted from the shard's start."""
        for placed, part in self.parts():
            layout = placed.entry.layout
            first = self.start + part.start - placed.start
            for piece, own in layout.piece_ranges(first, first + part.stop - part.start):
                start = placed.start - self.start + piece.row * math.prod(layout.shape[1:])
                yield piece, slice(start + own.start, start + own.stop)

    def owned(self) -> Iterator[tuple[Placed, BoxRange, slice]]:
        """Every box in this shard, with its parameter and its place counted from the shard's start."""
        for placed, part in self.parts():
            first = self.start + part.start - placed.start
            for box in placed.entry.layout.ranges(first, first + part.stop - part.start):
                start = part.start + box.offset
                yield placed, box, slice(start, start + box.numel)


class FlatBuffers:
    """Memory of one model chunk's weights and gradients: lists with one flat tensor a bucket.

    Args:
        registry: the chunk's parameters; they become views of `weights`.
        grid: over whose ranks optimizer state is sharded, each family's over its own.
        weight_dtype, grad_dtype: of the two.
        device: where they live.
        has_gradients: whether there are any.
        keeps_weights, keeps_gradients: whether whole buckets are kept, or this rank's parts alone, but for a tied
            embedding's.
    """

    def __init__(
        self,
        registry: ParamRegistry,
        *,
        grid: RankGrid,
        weight_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        device: torch.device,
        has_gradients: bool = True,
        keeps_weights: bool = True,
        keeps_gradients: bool = True,
    ) -> None:
        self.registry = registry
        self.buckets = _cut_buckets(registry, grid)
        self.shards = [_own_shard(bucket, grid.family(bucket.family).shard) for bucket in self.buckets]
        self._buckets_of: dict[int, list[int]] = {}
        for number, bucket in enumerate(self.buckets):
            for user in bucket.users:
                self._buckets_of.setdefault(user, []).append(number)
        self.weight_memory = BucketMemory(weight_dtype, device)
        self.gradient_memory = BucketMemory(grad_dtype, device)
        for number, (bucket, shard) in enumerate(zip(self.buckets, self.shards, strict=True)):
            stays = shard.numel == bucket.size or bucket.placed[0].entry.is_shared
            part = slice(shard.start, shard.stop)
            self.weight_memory.add(bucket.size, part, is_kept_full=stays or keeps_weights)
            if has_gradients:
                self.gradient_memory.add(bucket.size, part, is_kept_full=stays or keeps_gradients)
            self._give_memory(number, bucket)
            self.weight_memory.release(number)
            if has_gradients:
                self.gradient_memory.release(number)

    @property
    def weights(self) -> list[Tensor]:
        """Whole buckets."""
        return self.weight_memory.wholes

    @property
    def gradients(self) -> list[Tensor]:
        """Whole buckets; none without gradients."""
        return self.gradient_memory.wholes

    @property
    def weight_shards(self) -> list[Tensor]:
        """This rank's parts of the weights."""
        return self.weight_memory.parts

    @property
    def gradient_shards(self) -> list[Tensor]:
        """This rank's parts of the gradients."""
        return self.gradient_memory.parts

    def buckets_of(self, segment: int) -> Sequence[int]:
        """Numbers of the buckets that a segment works with."""
        return self._buckets_of.get(segment, ())

    def clear_gradients(self) -> None:
        """Set all gradients to zero."""
        self.gradient_memory.clear()

    def _give_memory(self, number: int, bucket: Bucket) -> None:
        """Make parameters views of the weights, and their modules' `weight_grads` views of the gradients."""
        for placed in bucket.placed:
            module, name, shape = placed.entry.module, placed.entry.attribute, placed.entry.layout.shape
            view = self.weights[number][placed.start : placed.stop].view(shape)
            module.register_parameter(name, nn.Parameter(view, requires_grad=bool(self.gradients)))
            if self.gradients:
                place = self.gradients[number][placed.start : placed.stop]
                module.weight_grads[name] = place.view(shape)


def _aligned(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _cut_buckets(registry: ParamRegistry, grid: RankGrid) -> list[Bucket]:
    buckets: list[Bucket] = []
    for entries in _grouped(registry):
        placed, at = [], 0
        for entry in entries:
            placed.append(Placed(entry, at))
            at = _aligned(at + entry.layout.numel, _ALIGNMENT)
        family = entries[0].layout.family
        size = _aligned(at, _ALIGNMENT * grid.family(family).shard.size)
        buckets.append(Bucket(entries[0].users, family, size, tuple(placed)))
    return buckets


def _grouped(registry: ParamRegistry) -> list[list[ParamEntry]]:
    """The parameters of each bucket, in order."""
    groups: dict[tuple[int, bool, Family], list[ParamEntry]] = {}
    for entry in registry.entries.values():
        groups.setdefault((entry.segment, entry.is_shared, entry.layout.family), []).append(entry)
    return [sorted(groups[key], key=lambda entry: entry.layout.group, reverse=True) for key in sorted(groups)]


def _own_shard(bucket: Bucket, shard_group: RankGroup) -> Shard:
    size = bucket.size // shard_group.size
    return Shard(bucket, shard_group.rank * size, (shard_group.rank + 1) * size)
