"""Gradients on their way to the ranks that own their shards, while the backward pass goes on.

    compute   backward segment 2 | backward segment 1 | backward segment 0 |
    network                      | sum bucket 2       | sum bucket 1       | sum bucket 0 | norm, optimizer

    of a bucket:   reduce-scatter over the ranks that share its state  ->  all-reduce over those that hold the same shard

Where whole gradients are not kept (ZeRO-2, arXiv:1910.02054), the first half follows each micro-batch: what arrives is
added to this rank's part, and the whole bucket's memory goes. Else it follows the last one, in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.profiler import record_function

from megatrain.parallel.bucket_memory import BucketMemory
from megatrain.parallel.collectives import begin_all_reduce, begin_reduce_scatter_into
from megatrain.parallel.grid import FamilyGroups


class GradientSums:
    """Sums buckets of gradients over the replicas: this rank's part of a bucket becomes the sum.

    Args:
        memory: of the gradients.
        families: of each bucket, the ranks that own different shards of it, and those that own the same one.
        overlaps: whether a sum goes on beside the backward pass; else it is waited for at once or begins when it has ended.
        dtype: in which gradients travel.
    """

    def __init__(
        self,
        memory: BucketMemory,
        families: Sequence[FamilyGroups],
        *,
        overlaps: bool,
        dtype: torch.dtype,
    ) -> None:
        self.memory = memory
        self.families = families
        self.overlaps = overlaps
        self.dtype = dtype
        self._complete: list[int] = []
        self._on_way: dict[int, Iterator[None]] = {}

    def bring(self, number: int) -> None:
        """Gradients are about to be added to a bucket."""
        while number in self._on_way:
            self._move_on(number)  # of the micro-batch before
        if not self.memory.is_whole(number):
            self.memory.bring(number)
            self.memory.wholes[number].zero_()

    def formed(self, number: int, *, is_last: bool) -> None:
        """All gradients of a micro-batch have been added to a bucket; `is_last`: and with them those of the step."""
        if not self.memory.is_kept_whole(number):
            self._begin(number, is_last=is_last)
            if not self.overlaps:
                self._finish_begun()
        elif is_last and self.overlaps:
            self._begin(number, is_last=True)
        elif is_last:
            self._complete.append(number)

    def finish(self) -> None:
        """What follows sees all sums."""
        for number in self._complete:
            self._begin(number, is_last=True)
        self._complete = []
        self._finish_begun()

    def _begin(self, number: int, *, is_last: bool) -> None:
        if not self._is_one_transfer_in_place(number):
            self._move_on_all()  # two buckets at most have scratch memory, and halves of sums take turns
        self._on_way[number] = self._sum(number, is_last=is_last)
        self._move_on(number)

    def _is_one_transfer_in_place(self, number: int) -> bool:
        is_one = self.families[number].shard.size == 1 or self.families[number].copies.size == 1
        return is_one and self.dtype == self.memory.dtype and self.memory.is_kept_whole(number)

    def _finish_begun(self) -> None:
        while self._on_way:
            self._move_on_all()

    def _move_on_all(self) -> None:
        """Each of them, in the order in which they began."""
        for number in list(self._on_way):
            self._move_on(number)

    def _move_on(self, number: int) -> None:
        """Let a sum on its way wait for what it does and begin what it does next, if there is more."""
        with record_function("reduce gradients"):
            if next(self._on_way[number], "ended") == "ended":
                del self._on_way[number]

    def _sum(self, number: int, *, is_last: bool) -> Iterator[None]:
        """Communicates up to each `yield`, and waits behind it."""
        own, copies = self.memory.parts[number], self.families[number].copies
        if self.families[number].shard.size > 1:
            yield from self._scatter(number, own)
        if is_last and copies.size > 1:
            sent = own.to(self.dtype)
            transfer = begin_all_reduce(sent, copies)
            yield
            transfer.wait()
            if sent is not own:
                own.copy_(sent)

    def _scatter(self, number: int, own: Tensor) -> Iterator[None]:
        whole, is_kept_whole = self.memory.wholes[number], self.memory.is_kept_whole(number)
        sent = whole.to(self.dtype)
        is_in_place = sent is whole and is_kept_whole
        received = own if is_in_place else torch.empty_like(own, dtype=self.dtype)
        transfer = begin_reduce_scatter_into(received, sent, self.families[number].shard)
        yield
        transfer.wait()
        if is_kept_whole and not is_in_place:
            own.copy_(received)
        if not is_kept_whole:
            add_to_part(own, received)
            self.memory.release(number)


def add_to_part(own: Tensor, received: Tensor) -> None:
    """Add what the replicas' gradients of a micro-batch come to."""
    own.add_(received)
