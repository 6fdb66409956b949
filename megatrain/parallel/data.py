"""Data parallelism: gradients are summed over the replicas bucket by bucket, weights gathered likewise.

With the distributed optimizer (ZeRO-1) each rank gets the sum of its own shards; without it, everyone gets all.
Losses are scaled beforehand, so that sums are what is wanted and no average is taken here.
"""

from __future__ import annotations

import torch

from megatrain.parallel.buffers import FlatBuffers
from megatrain.parallel.collectives import all_gather_into, all_reduce, reduce_scatter
from megatrain.parallel.grid import RankGrid, RankGroup


class DataParallel:
    """Moves one model chunk's gradients and weights between its replicas.

    Args:
        buffers: the chunk's memory, cut for `shard_group`.
        grid: whose `dp` ranks are the replicas.
        shard_group: `grid.dp` with the distributed optimizer, else a group of this rank alone.
    """

    def __init__(self, buffers: FlatBuffers, grid: RankGrid, shard_group: RankGroup) -> None:
        self.buffers = buffers
        self.grid = grid
        self.shard_group = shard_group

    def reduce_segment(self, segment: int) -> None:
        """Sum the gradients of a segment over the replicas; called when its last weight gradient is formed."""
        buffers = self.buffers
        for bucket, whole, own in zip(
            buffers.buckets, buffers.gradients, buffers.gradient_shards, strict=True
        ):
            if bucket.segment != segment:
                continue
            if self.shard_group.size == 1:
                all_reduce(whole, self.grid.dp)
            else:
                own.copy_(reduce_scatter(whole, self.shard_group))

    def sum_partial_gradients(self) -> None:
        """Complete the gradients that are partial sums over another group; called once all segments are reduced.

        Ranks of such a group hold the same boxes at the same places of their shards, so only shards travel.
        """
        ranges: dict[str, list[torch.Tensor]] = {}
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

    def gather_weights(self) -> None:
        """Give every replica the weights that the others' optimizers have written."""
        for whole, own in zip(self.buffers.weights, self.buffers.weight_shards, strict=True):
            all_gather_into(whole, own, self.shard_group)
