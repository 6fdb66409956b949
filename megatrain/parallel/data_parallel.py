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
from torch.profiler import record_function

from megatrain.parallel.buffers import Bucket, FlatBuffers
from megatrain.parallel.collectives import (
    Transfer,
    all_reduce,
    begin_all_gather_into,
    begin_all_reduce,
    begin_reduce_scatter_into,
)
from megatrain.parallel.grid import FamilyGroups, RankGrid, RankGroup
from megatrain.parallel.pipeline.executor import SegmentPass
from megatrain.parallel.pipeline.schedule import ActionKind


class BucketMemory:
    """Weights or gradients of one model chunk.

    Attributes:
        wholes: flat tensors, one a bucket.
        parts: this rank's shards of them.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.wholes: list[Tensor] = []
        self.parts: list[Tensor] = []
        self._is_kept_whole: list[bool] = []
        self._is_whole: list[bool] = []

    def add(self, size: int, part_of: slice, *, is_kept_full: bool) -> None:
        """Another bucket, zeroed and whole. Call `release` once its views are made."""
        whole = torch.zeros(size, dtype=self.dtype, device=self.device)
        part = whole[part_of]
        self.wholes.append(whole)
        self.parts.append(part if is_kept_full else torch.zeros_like(part))
        self._is_kept_whole.append(is_kept_full)
        self._is_whole.append(True)

    def is_kept_full(self, number: int) -> bool:
        """Whether this bucket's memory never goes."""
        return self._is_kept_whole[number]

    def is_whole(self, number: int) -> bool:
        """Whether this bucket's memory is there."""
        return self._is_whole[number]

    def bring(self, number: int) -> None:
        """Memory for the whole bucket, with whatever was in it, if it is not there."""
        if not self._is_whole[number]:
            whole = self.wholes[number]
            whole.untyped_storage().resize_(whole.numel() * whole.element_size())
            self._is_whole[number] = True

    def release(self, number: int) -> None:
        """Give the whole bucket's memory back, where it is not kept.

        What a collective reads or writes must have been waited for: what gets the memory next follows on this stream.
        """
        if not self._is_kept_whole[number]:
            self.wholes[number].untyped_storage().resize_(0)
            self._is_whole[number] = False

    @property
    def kept(self) -> list[Tensor]:
        """What is always there: of each bucket the whole, or this rank's part."""
        pairs = zip(self.wholes, self.parts, self._is_kept_whole, strict=True)
        return [whole if is_whole else part for whole, part, is_whole in pairs]

    def clear(self) -> None:
        """Set all that is kept to zero."""
        if self.wholes:
            torch._foreach_zero_(self.kept)


class WeightAllGather:
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
        if self.memory.is_kept_full(number):
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


class GradientReduction:
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
        if not self.memory.is_kept_full(number):
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
        return is_one and self.dtype == self.memory.dtype and self.memory.is_kept_full(number)

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
        whole, is_kept_full = self.memory.wholes[number], self.memory.is_kept_full(number)
        sent = whole.to(self.dtype)
        is_in_place = sent is whole and is_kept_full
        received = own if is_in_place else torch.empty_like(own, dtype=self.dtype)
        transfer = begin_reduce_scatter_into(received, sent, self.families[number].shard)
        yield
        transfer.wait()
        if is_kept_full and not is_in_place:
            own.copy_(received)
        if not is_kept_full:
            add_to_shard(own, received)
            self.memory.release(number)


def add_to_shard(own: Tensor, received: Tensor) -> None:
    """Add what the replicas' gradients of a micro-batch come to."""
    own.add_(received)


@dataclass(frozen=True, kw_only=True)
class DataParallelOptions:
    """How gradients and weights travel."""

    overlap_grad_reduce: bool = True
    """Whether gradients are summed beside the computation. Results are the same bits."""
    overlap_param_gather: bool = True
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
        transport: DataParallelOptions = DataParallelOptions(),
    ) -> None:
        self.buffers = buffers
        self.grid = grid
        families = [grid.family(bucket.family) for bucket in buffers.buckets]
        self.weights = WeightAllGather(
            buffers.weight_memory,
            [family.shard for family in families],
            overlaps=transport.overlap_param_gather,
        )
        self.gradients = GradientReduction(
            buffers.gradient_memory,
            families,
            overlaps=transport.overlap_grad_reduce,
            dtype=transport.grad_dtype or buffers.gradient_memory.dtype,
        )
        self._coming: deque[SegmentPass] = deque()

    def on_schedule(self, passes: Sequence[SegmentPass]) -> None:
        """See `SegmentHooks`."""
        self._coming = deque(passes)

    def before(self, segment_pass: SegmentPass) -> None:
        """See `SegmentHooks`. What the next segment_pass needs begins to come meanwhile."""
        expected = self._coming.popleft()
        assert segment_pass == expected, f"{segment_pass} comes before {expected}"
        if segment_pass.kind is not ActionKind.FORWARD or self._turns_behind(segment_pass):
            for number in self.buffers.buckets_of(segment_pass.segment):
                self.gradients.bring(number)
        if segment_pass.kind is not ActionKind.WEIGHT:
            for number in self.buffers.buckets_of(segment_pass.segment):
                self.weights.need(number)
            for number in self._needed_next():
                self.weights.prefetch(number)

    def after(self, segment_pass: SegmentPass) -> None:
        """See `SegmentHooks`."""
        if segment_pass.kind is not ActionKind.WEIGHT:
            needed = self._needed_next()
            for number in self.buffers.buckets_of(segment_pass.segment):
                if number not in needed:
                    self.weights.release(number)

    def on_gradients(self, segment: int, *, is_last: bool) -> None:
        """See `SegmentHooks`. Backward passes go down, so the first of a bucket's users is its last one."""
        for number in self.buffers.buckets_of(segment):
            if segment == self.buffers.buckets[number].users[0]:
                self.gradients.formed(number, is_last=is_last)

    def _turns_behind(self, segment_pass: SegmentPass) -> bool:
        """Whether the backward pass of a segment follows its forward pass at once: a head forms gradients in both."""
        return bool(self._coming) and self._coming[0] == SegmentPass(ActionKind.BACKWARD, segment_pass.segment)

    def _needed_next(self) -> Sequence[int]:
        """The buckets that the next segment_pass of weights will need."""
        for segment_pass in self._coming:
            if segment_pass.kind is not ActionKind.WEIGHT:
                return self.buffers.buckets_of(segment_pass.segment)
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

    def all_gather_all_weights(self) -> None:
        """The same of all buckets; what is on its way from before has arrived then."""
        self.weights.wait()
        for number in range(len(self.buffers.buckets)):
            self.weights.publish(number)

    def wait_for_weights(self) -> None:
        """For those who read or write shards of weights: nothing is on its way."""
        self.weights.wait()

    def gathered_buckets(self) -> Iterator[tuple[Bucket, Tensor]]:
        """Each bucket with its whole weights, one after the other, for those who read them other than through the executor."""
        for number, bucket in enumerate(self.buffers.buckets):
            self.weights.need(number)
            yield bucket, self.buffers.weights[number]
            self.weights.release(number)

    def sum_over_ranks(self, number: Tensor) -> Tensor:
        """The sum, in place, over all ranks, each of which has counted elements that no other rank counts."""
        return all_reduce(number, self.grid.world)
