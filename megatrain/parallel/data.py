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
        for shard in self.buffers.shards:
            if shard.bucket.segment != segment:
                continue
            gradients = self.buffers.gradients[shard.bucket.start : shard.bucket.stop]
            if self.shard_group.size == 1:
                all_reduce(gradients, self.grid.dp)
            else:
                self.buffers.gradients[shard.start : shard.stop].copy_(
                    reduce_scatter(gradients, self.shard_group)
                )

    def sum_partial_gradients(self) -> None:
        """Complete the gradients that are partial sums over another group; called once all segments are reduced.

        Ranks of such a group hold the same boxes at the same places of their shards, so only shards travel.
        """
        ranges: dict[str, list[torch.Tensor]] = {}
        for shard in self.buffers.shards:
            for placed in shard.bucket.placed:
                low, high = max(shard.start, placed.start), min(shard.stop, placed.stop)
                name = placed.entry.layout.grad_sum_group
                if name is not None and low < high:
                    ranges.setdefault(name, []).append(self.buffers.gradients[low:high])
        for name in sorted(ranges):
            joined = all_reduce(torch.cat(ranges[name]), self.grid.group(name))
            for part, total in zip(
                ranges[name], joined.split([part.numel() for part in ranges[name]]), strict=True
            ):
                part.copy_(total)

    def gather_weights(self) -> None:
        """Give every replica the weights that the others' optimizers have written."""
        for shard in self.buffers.shards:
            bucket = self.buffers.weights[shard.bucket.start : shard.bucket.stop]
            all_gather_into(bucket, self.buffers.weights[shard.start : shard.stop], self.shard_group)
