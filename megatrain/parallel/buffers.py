"""Flat buffers: the weights of this rank's model chunk in a tensor a bucket, their gradients in others, place for place.

    segment 0   | segment 1              | segment 2 ...       a bucket is what is reduced and gathered at once
    bucket 0    | bucket 1               | bucket 2
    shard 0 | 1 | shard 0    | shard 1   | ...                 a rank's optimizer owns its shard of every bucket

A parameter is a view of a bucket's weights. Gradients of linear layers are accumulated straight into its
gradients. Within a bucket, parameters that the optimizer treats alike stand together, so that it works on few ranges.
A tied embedding has a bucket of its own, with shards that lie alike on the first and the last pipeline stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatrain.parallel.grid import RankGroup
from megatrain.parallel.layout import BoxRange, ParamEntry, ParamRegistry, Piece

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
    """Parameters that lie in one tensor: those of a segment, or a tied embedding."""

    users: tuple[int, ...]
    """Segments that work with them: one, or more with a tied embedding."""
    size: int
    """Elements, with what aligns them."""
    placed: tuple[Placed, ...]


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

    Attributes:
        weights, gradients: whole buckets.
        weight_shards, gradient_shards: this rank's parts of them.

    Args:
        registry: the chunk's parameters; they become views of `weights`.
        shard_group: ranks over which optimizer state is sharded (one rank: no sharding).
        weight_dtype, grad_dtype: of the two.
        device: where they live.
    """

    def __init__(
        self,
        registry: ParamRegistry,
        *,
        shard_group: RankGroup,
        weight_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        device: torch.device,
        has_gradients: bool = True,
    ) -> None:
        self.registry = registry
        self.buckets = _cut_buckets(registry, shard_group.size)
        self.shards = _cut_shards(self.buckets, shard_group)
        self._buckets_of: dict[int, list[int]] = {}
        for number, bucket in enumerate(self.buckets):
            for user in bucket.users:
                self._buckets_of.setdefault(user, []).append(number)
        sizes = [bucket.size for bucket in self.buckets]
        self.weights = [torch.zeros(size, dtype=weight_dtype, device=device) for size in sizes]
        self.gradients = (
            [torch.zeros(size, dtype=grad_dtype, device=device) for size in sizes] if has_gradients else []
        )
        self.weight_shards = self._own_parts(self.weights)
        self.gradient_shards = self._own_parts(self.gradients)
        self._give_memory()

    def buckets_of(self, segment: int) -> Sequence[int]:
        """Numbers of the buckets that a segment works with."""
        return self._buckets_of.get(segment, ())

    def clear_gradients(self) -> None:
        """Set all gradients to zero."""
        torch._foreach_zero_(self.gradients)

    def _own_parts(self, wholes: list[Tensor]) -> list[Tensor]:
        return [whole[shard.start : shard.stop] for whole, shard in zip(wholes, self.shards, strict=False)]

    def _give_memory(self) -> None:
        """Make parameters views of the weights, and their modules' `weight_grads` views of the gradients."""
        for number, bucket in enumerate(self.buckets):
            for placed in bucket.placed:
                module, name, shape = placed.entry.module, placed.entry.attribute, placed.entry.layout.shape
                view = self.weights[number][placed.start : placed.stop].view(shape)
                module.register_parameter(name, nn.Parameter(view, requires_grad=bool(self.gradients)))
                if self.gradients:
                    place = self.gradients[number][placed.start : placed.stop]
                    module.weight_grads[name] = place.view(shape)


def _aligned(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _cut_buckets(registry: ParamRegistry, num_shards: int) -> list[Bucket]:
    buckets: list[Bucket] = []
    for entries in _grouped(registry):
        placed, at = [], 0
        for entry in entries:
            placed.append(Placed(entry, at))
            at = _aligned(at + entry.layout.numel, _ALIGNMENT)
        buckets.append(Bucket(entries[0].users, _aligned(at, _ALIGNMENT * num_shards), tuple(placed)))
    return buckets


def _grouped(registry: ParamRegistry) -> list[list[ParamEntry]]:
    """The parameters of each bucket, in order."""
    groups: dict[tuple[int, bool], list[ParamEntry]] = {}
    for entry in registry.entries.values():
        groups.setdefault((entry.segment, entry.is_shared), []).append(entry)
    return [sorted(groups[key], key=lambda entry: entry.layout.group, reverse=True) for key in sorted(groups)]


def _cut_shards(buckets: list[Bucket], shard_group: RankGroup) -> list[Shard]:
    shards: list[Shard] = []
    for bucket in buckets:
        size = bucket.size // shard_group.size
        shards.append(Shard(bucket, shard_group.rank * size, (shard_group.rank + 1) * size))
    return shards
