"""Gradients on their way to the ranks that own their shards, while the backward pass goes on.

compute   backward segment 2 | backward segment 1 | backward segment 0 |
network                      | sum bucket 2       | sum bucket 1       | sum bucket 0 | norm, optimizer

of a bucket:   reduce-scatter over the ranks that share its state  ->  all-reduce over those that hold the same shard
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.profiler import record_function

from megatrain.parallel.buffers import FlatBuffers
from megatrain.parallel.collectives import begin_all_reduce, begin_reduce_scatter_into
from megatrain.parallel.grid import RankGroup


class GradientSums:
    """Sums buckets of gradients over the replicas, in place: this rank's shard of a bucket becomes the sum.

    Args:
        shards: the ranks that own different shards of a bucket.
        copies: the ranks that own the same one.
        overlaps: whether a sum goes on beside the backward pass; else all begin when it has ended.
    """

    def __init__(self, buffers: FlatBuffers, shards: RankGroup, copies: RankGroup, *, overlaps: bool) -> None:
        self.buffers = buffers
        self.shards = shards
        self.copies = copies
        self.overlaps = overlaps
        self._complete: list[int] = []
        self._on_way: list[Iterator[None]] = []

    def complete(self, number: int) -> None:
        """All gradients of the step are in a bucket."""
        if self.overlaps:
            self._begin(number)
        else:
            self._complete.append(number)

    def finish(self) -> None:
        """What follows sees all sums."""
        for number in self._complete:
            self._begin(number)
        self._complete = []
        while self._on_way:
            self._move_on()

    def _begin(self, number: int) -> None:
        if self.shards.size > 1 and self.copies.size > 1:
            self._move_on()  # the second half of the sum before follows the first half of this one
        self._on_way.append(self._sum(number))
        self._move_on(-1)

    def _move_on(self, first: int = 0) -> None:
        """Let the sums on their way, from this one on, wait for what they do and begin what they do next."""
        with record_function("reduce gradients"):
            moving = self._on_way[first:]
            self._on_way[first:] = [one for one in moving if next(one, "ended") is None]

    def _sum(self, number: int) -> Iterator[None]:
        """Communicates up to each `yield`, and waits behind it."""
        whole, own = self.buffers.gradients[number], self.buffers.gradient_shards[number]
        if self.shards.size > 1:
            transfer = begin_reduce_scatter_into(own, whole, self.shards)
            yield
            transfer.wait()
        if self.copies.size > 1:
            transfer = begin_all_reduce(own, self.copies)
            yield
            transfer.wait()
