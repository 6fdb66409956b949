"""Weights on their way from the optimizers that own their shards to the replicas that compute with them.

    optimizer    update bucket 0 | update bucket 1 | update bucket 2 ...
    network                      | gather bucket 0 | gather bucket 1 | ...
    next step                                              forward of segment 0 waits for bucket 0 alone

Where whole weights are not kept (ZeRO-3, arXiv:1910.02054), in forward and in backward passes:

    compute      segment 3                  | segment 4                  | segment 5
    network      gather 4                   | gather 5                   | gather 6
    memory       3 and 4                    | 4 and 5                    | 5 and 6
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.profiler import record_function

from megatrain.parallel.bucket_memory import BucketMemory
from megatrain.parallel.collectives import Transfer, begin_all_gather_into
from megatrain.parallel.grid import RankGroup


class WeightGathers:
    """Gathers whole buckets of weights.

    Args:
        memory: of the weights.
        shards: of each bucket, the ranks whose shards make it up.
        overlaps: whether a gather goes on until the weights are needed; else it begins where it is waited for.
    """

    def __init__(self, memory: BucketMemory, shards: Sequence[RankGroup], *, overlaps: bool) -> None:
        self.memory = memory
        self.shards = shards
        self.overlaps = overlaps
        self._on_way: dict[int, Transfer] = {}

    def publish(self, number: int) -> None:
        """A bucket's shards have been written: begin to gather it, where it is kept whole."""
        assert number not in self._on_way, "a shard was written while it was gathered"
        if self.memory.is_kept_whole(number):
            self._on_way[number] = self.begin(number)
            if not self.overlaps:
                self.need(number)

    def prefetch(self, number: int) -> None:
        """Begin to gather a bucket that will be needed soon and is not there."""
        if self.overlaps and not self.memory.is_whole(number):
            self._on_way[number] = self.begin(number)

    def need(self, number: int) -> None:
        """What follows sees the whole bucket."""
        if not self.memory.is_whole(number):
            self._on_way[number] = self.begin(number)
        transfer = self._on_way.pop(number, None)
        if transfer is not None:
            transfer.wait()

    def wait(self) -> None:
        """What follows sees all buckets that are on their way."""
        for number in list(self._on_way):
            self.need(number)

    def release(self, number: int) -> None:
        """A bucket is not needed for a while."""
        self.memory.release(number)

    def begin(self, number: int) -> Transfer:
        """Begin to gather a bucket, whoever waits for it."""
        self.memory.bring(number)
        with record_function("gather weights"):
            whole = self.memory.wholes[number].data  # as autograd must not see that weights come and go
            return begin_all_gather_into(whole, self.memory.parts[number], self.shards[number])
