"""Data parallelism: gradients are summed over the replicas bucket by bucket, weights gathered likewise.

    before a segment's work     its weights must be there        data_weights.py
    behind its gradients        their sum begins                 data_gradients.py

With the distributed optimizer each rank gets the sums of its own shards, over which optimizer state (ZeRO-1), gradients
(ZeRO-2) and weights (ZeRO-3) are spread; without it, everyone gets all.
Losses are scaled beforehand, so that sums are what is wanted and no average is taken here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.parallel.buffers import Bucket, FlatBuffers
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.data_gradients import GradientSums
from megatrain.parallel.data_weights import WeightGathers
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.pipeline.executor import Use
from megatrain.parallel.pipeline.schedule import Kind


@dataclass(frozen=True, kw_only=True)
class Transport:
    """How gradients and weights travel."""

    overlaps_gradients: bool = True
    """Whether gradients are summed beside the computation. Results are the same bits."""
    overlaps_weights: bool = True
    """Whether weights are gathered beside the computation. Results are the same bits."""
    grad_dtype: torch.dtype | None = None
    """In which gradients travel; None: as they are kept."""


class DataParallel:
    """Moves one model chunk's gradients and weights between its replicas. It is the executor's `SegmentHooks`.

    Args:
        buffers: the chunk's memory, cut for this grid.
        grid: whose replicas of dense layers and of experts they are.
        transport: how they travel.
    """

    def __init__(
        self,
        buffers: FlatBuffers,
        grid: RankGrid,
        transport: Transport = Transport(),
    ) -> None:
        self.buffers = buffers
        self.grid = grid
        families = [grid.family(bucket.family) for bucket in buffers.buckets]
        self.weights = WeightGathers(
            buffers.weight_memory,
            [family.shard for family in families],
            overlaps=transport.overlaps_weights,
        )
        self.gradients = GradientSums(
            buffers.gradient_memory,
            families,
            overlaps=transport.overlaps_gradients,
            dtype=transport.grad_dtype or buffers.gradient_memory.dtype,
        )
        self._coming: deque[Use] = deque()

    def expect(self, uses: Sequence[Use]) -> None:
        """See `SegmentHooks`."""
        self._coming = deque(uses)

    def before(self, use: Use) -> None:
        """See `SegmentHooks`. What the next use needs begins to come meanwhile."""
        expected = self._coming.popleft()
        assert use == expected, f"{use} comes before {expected}"
        if use.kind is not Kind.FORWARD or self._turns_behind(use):
            for number in self.buffers.buckets_of(use.segment):
                self.gradients.bring(number)
        if use.kind is not Kind.WEIGHT:
            for number in self.buffers.buckets_of(use.segment):
                self.weights.need(number)
            for number in self._needed_next():
                self.weights.prefetch(number)

    def after(self, use: Use) -> None:
        """See `SegmentHooks`."""
        if use.kind is not Kind.WEIGHT:
            needed = self._needed_next()
            for number in self.buffers.buckets_of(use.segment):
                if number not in needed:
                    self.weights.release(number)

    def on_gradients(self, segment: int, *, is_last: bool) -> None:
        """See `SegmentHooks`. Backward passes go down, so the first of a bucket's users is its last one."""
        for number in self.buffers.buckets_of(segment):
            if segment == self.buffers.buckets[number].users[0]:
                self.gradients.formed(number, is_last=is_last)

    def _turns_behind(self, use: Use) -> bool:
        """Whether the backward pass of a segment follows its forward pass at once: a head forms gradients in both."""
        return bool(self._coming) and self._coming[0] == Use(Kind.BACKWARD, use.segment)

    def _needed_next(self) -> Sequence[int]:
        """The buckets that the next use of weights will need."""
        for use in self._coming:
            if use.kind is not Kind.WEIGHT:
                return self.buffers.buckets_of(use.segment)
        return ()

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
        """For those who read or write shards of weights: nothing is on its way."""
        self.weights.wait()

    def whole_buckets(self) -> Iterator[tuple[Bucket, Tensor]]:
        """Each bucket with its whole weights, one after the other, for those who read them other than through the executor."""
        for number, bucket in enumerate(self.buffers.buckets):
            self.weights.need(number)
            yield bucket, self.buffers.weights[number]
            self.weights.release(number)

    def sum_over_ranks(self, number: Tensor) -> Tensor:
        """The sum, in place, over all ranks, each of which has counted elements that no other rank counts."""
        return all_reduce(number, self.grid.world)
