"""Flat buffers: the weights of this rank's model chunk in one tensor, their gradients in another, place for place.

    segment 0   | segment 1              | segment 2 ...       a bucket is what is reduced and gathered at once
    bucket 0    | bucket 1               | bucket 2
    shard 0 | 1 | shard 0    | shard 1   | ...                 a rank's optimizer owns its shard of every bucket

A parameter is a view of the weights buffer. Gradients of linear layers are accumulated straight into the gradient
buffer. Within a bucket, parameters that the optimizer treats alike stand together, so that it works on few ranges.
A tied embedding has a bucket of its own: its shards then lie alike on the first and the last pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from megatrain.parallel.grid import RankGroup
from megatrain.parallel.layout import BoxRange, ParamEntry, ParamRegistry

_ALIGNMENT = 64
"""Elements; every parameter and every shard starts at a multiple, so that kernels may use their widest loads."""


@dataclass(frozen=True)
class Placed:
    """A parameter and where it begins in the buffers."""

    entry: ParamEntry
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.entry.layout.numel


@dataclass(frozen=True)
class Bucket:
    """A contiguous part of the buffers, of one segment."""

    segment: int
    start: int
    stop: int
    placed: tuple[Placed, ...]


@dataclass(frozen=True)
class Shard:
    """The part of a bucket that this rank's optimizer owns: buffer elements `start` to `stop`."""

    bucket: Bucket
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def owned(self) -> Iterator[tuple[Placed, BoxRange, slice]]:
        """Every box in this shard, with its parameter and its place counted from the shard's start."""
        for placed in self.bucket.placed:
            low, high = max(self.start, placed.start), min(self.stop, placed.stop)
            if low < high:
                for box in placed.entry.layout.ranges(low - placed.start, high - placed.start):
                    first = low - self.start + box.offset
                    yield placed, box, slice(first, first + box.numel)


class FlatBuffers:
    """Memory of one model chunk's weights and gradients.

    Args:
        registry: the chunk's parameters; they become views of `weights`.
        shard_group: ranks over which optimizer state is sharded (one rank: no sharding).
        weight_dtype, grad_dtype: of the two buffers.
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
        size = self.buckets[-1].stop if self.buckets else 0
        self.weights = torch.zeros(size, dtype=weight_dtype, device=device)
        self.gradients = torch.zeros(size if has_gradients else 0, dtype=grad_dtype, device=device)
        for bucket in self.buckets:
            for placed in bucket.placed:
                self._give_memory(placed, has_gradients=has_gradients)

    def _give_memory(self, placed: Placed, *, has_gradients: bool) -> None:
        entry, shape = placed.entry, placed.entry.layout.shape
        view = self.weights[placed.start : placed.stop].view(shape)
        entry.module.register_parameter(entry.attribute, nn.Parameter(view, requires_grad=has_gradients))
        if has_gradients:
            entry.module.weight_grads[entry.attribute] = self.gradients[placed.start : placed.stop].view(
                shape
            )


def _aligned(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _cut_buckets(registry: ParamRegistry, num_shards: int) -> list[Bucket]:
    buckets: list[Bucket] = []
    start = 0
    for key, entries in _grouped(registry).items():
        placed, at = [], start
        for entry in entries:
            placed.append(Placed(entry, at))
            at = _aligned(at + entry.layout.numel, _ALIGNMENT)
        stop = start + _aligned(at - start, _ALIGNMENT * num_shards)
        buckets.append(Bucket(key[0], start, stop, tuple(placed)))
        start = stop
    return buckets


def _grouped(registry: ParamRegistry) -> dict[tuple[int, bool], list[ParamEntry]]:
    groups: dict[tuple[int, bool], list[ParamEntry]] = {}
    for entry in registry.entries.values():
        is_tied = entry.layout.grad_sum_group == "embedding"
        groups.setdefault((entry.segment, is_tied), []).append(entry)
    return {
        key: sorted(groups[key], key=lambda entry: entry.layout.group, reverse=True) for key in sorted(groups)
    }


def _cut_shards(buckets: list[Bucket], shard_group: RankGroup) -> list[Shard]:
    shards: list[Shard] = []
    for bucket in buckets:
        size = (bucket.stop - bucket.start) // shard_group.size
        start = bucket.start + shard_group.rank * size
        shards.append(Shard(bucket, start, start + size))
    return shards
