"""Data parallelism: gradients are summed over the replicas bucket by bucket, weights gathered likewise.

    before a segment's work     its weights must be there        data_weights.py
    behind its gradients        their sum begins                 data_gradients.py

With the distributed optimizer (ZeRO-1) each rank gets the sum of its own shards; without it, everyone gets all.
Losses are scaled beforehand, so that sums are what is wanted and no average is taken here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.parallel.buffers import FlatBuffers
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.data_gradients import GradientSums
from megatrain.parallel.data_weights import WeightGathers
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.pipeline.executor import Use
from megatrain.parallel.pipeline.schedule import Kind


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What runs beside the computation. Results are the same bits."""

    reduces_gradients: bool = True
    gathers_weights: bool = True


class DataParallel:
    """Moves one model chunk's gradients and weights between its replicas. It is the executor's `SegmentHooks`.

    Args:
        buffers: the chunk's memory, cut for `grid.dp_shard`.
        grid: whose `dp` ranks are the replicas.
        overlap: what does not wait until it is done.
    """

    def __init__(self, buffers: FlatBuffers, grid: RankGrid, overlap: Overlap = Overlap()) -> None:
        self.buffers = buffers
        self.grid = grid
        self.weights = WeightGathers(buffers, grid.dp_shard, overlaps=overlap.gathers_weights)
        self.gradients = GradientSums(
            buffers, grid.dp_shard, grid.dp_copies, overlaps=overlap.reduces_gradients
        )

    def expect(self, uses: Sequence[Use]) -> None:
        """See `SegmentHooks`."""

    def before(self, use: Use) -> None:
        """See `SegmentHooks`."""
        if use.kind is not Kind.WEIGHT:
            for number in self.buffers.buckets_of(use.segment):
                self.weights.need(number)

    def after(self, use: Use) -> None:
        """See `SegmentHooks`."""

    def on_gradients(self, segment: int, *, is_last: bool) -> None:
        """See `SegmentHooks`. Backward passes go down, so the first of a bucket's users is its last one."""
        for number in self.buffers.buckets_of(segment):
            if is_last and segment == self.buffers.buckets[number].users[0]:
                self.gradients.complete(number)

    def finish_gradients(self) -> None:
        """End all sums over the replicas, and those of gradients that are partial sums over another group.

        Ranks of such a group hold the same boxes at the same places of their shards, so only shards travel.
        """
        self.gradients.finish()
        ranges: dict[str, list[Tensor]] = {}
        for shard, gradients in zip(self.buffers.shards, self.buffers.gradient_shards, strict=True):
            for piece, part in shard.pieces():
                if piece.grad_sum_group is not None:
                    ranges.setdefault(piece.grad_sum_group, []).append(gradients[part])
        for name in sorted(ranges):
            joined = all_reduce(torch.cat(ranges[name]), self.grid.group(name))
            for flat, total in zip(
                ranges[name], joined.split([part.numel() for part in ranges[name]]), strict=True
            ):
                flat.copy_(total)

    def publish(self, number: int) -> None:
        """Give every replica the weights of a bucket, whose shards the optimizers have written."""
        self.weights.publish(number)

    def publish_all(self) -> None:
        """The same of all buckets; what is on its way from before has arrived then."""
        self.weights.wait()
        for number in range(len(self.buffers.buckets)):
            self.weights.publish(number)

    def wait_for_weights(self) -> None:
        """For those who read weights other than through the executor."""
        self.weights.wait()

    def sum_over_shards(self, number: Tensor) -> Tensor:
        """The sum, in place, over the ranks that own different elements of the model."""
        return all_reduce(all_reduce(number, self.grid.tp_pp), self.grid.dp_shard)
