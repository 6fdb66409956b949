"""Weights on their way from the optimizers that own their shards to the replicas that compute with them.

optimizer    update bucket 0 | update bucket 1 | update bucket 2 ...
network                      | gather bucket 0 | gather bucket 1 | ...
next step                                              forward of segment 0 waits for bucket 0 alone
"""

from __future__ import annotations

from torch.profiler import record_function

from megatrain.parallel.buffers import FlatBuffers
from megatrain.parallel.collectives import Transfer, begin_all_gather_into
from megatrain.parallel.grid import RankGroup


class WeightGathers:
    """Gathers whole buckets of weights.

    Args:
        shards: the ranks whose shards make up a bucket.
        overlaps: whether a gather goes on until the weights are needed; else it is waited for at once.
    """

    def __init__(self, buffers: FlatBuffers, shards: RankGroup, *, overlaps: bool) -> None:
        self.buffers = buffers
        self.shards = shards
        self.overlaps = overlaps
        self._on_way: dict[int, Transfer] = {}

    def publish(self, number: int) -> None:
        """Begin to gather a bucket; its shards have been written."""
        assert number not in self._on_way, "a shard was written while it was gathered"
        self._on_way[number] = self.begin(number)
        if not self.overlaps:
            self.need(number)

    def need(self, number: int) -> None:
        """What follows sees the whole bucket."""
        transfer = self._on_way.pop(number, None)
        if transfer is not None:
            transfer.wait()

    def wait(self) -> None:
        """What follows sees all buckets that were published."""
        for number in list(self._on_way):
            self.need(number)

    def begin(self, number: int) -> Transfer:
        """Begin to gather a bucket, whoever waits for it."""
        with record_function("gather weights"):
            return begin_all_gather_into(
                self.buffers.weights[number], self.buffers.weight_shards[number], self.shards
            )
