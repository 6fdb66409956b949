"""Data parallelism: reduces gradients over the replicas and all-gathers weights, one bucket at a time.

    compute      backward segment 2 | backward segment 1 | backward segment 0  |
    network                         | reduce bucket 2    | reduce bucket 1     | reduce bucket 0 | norm, optimizer

    optimizer    update bucket 0    | update bucket 1    | update bucket 2 ...
    network                         | gather bucket 0    | gather bucket 1     | ...
    next step                                              forward of segment 0 waits for bucket 0 only

A reduction is a reduce-scatter over the ranks that shard the bucket's state, then an all-reduce over those with the same
shard. The distributed optimizer shards optimizer state (ZeRO-1), gradients (ZeRO-2: every micro-batch is reduced and
added to the shard) and weights (ZeRO-3: gathered for every pass). The loss is scaled in advance: gradients are summed.

    compute      segment 3          | segment 4          | segment 5
    network      gather 4           | gather 5           | gather 6
    allocated    3 and 4            | 4 and 5            | 5 and 6            one more while two passes run in turn

Source: ZeRO, arXiv:1910.02054.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from megatrain.kernels.linear import FirstWrite
from megatrain.parallel.buckets import Bucket, FirstWrites, Shard, parts_between
from megatrain.parallel.collectives import (
    Transfer,
    all_reduce,
    begin_all_gather_into,
    begin_all_reduce,
    begin_reduce_scatter_into,
)
from megatrain.parallel.grid import FamilyGroups, RankGrid, RankGroup
from megatrain.parallel.layout import ParamRegistry
from megatrain.parallel.pipeline.actions import ActionKind
from megatrain.parallel.pipeline.segments import SegmentHooks, SegmentPass


class BucketMemory:
    """The weights or the gradients of one model chunk: a flat tensor per bucket, and this rank's shard of each.

        kept full   full ▓▓▓▓▓▓▓▓                      the shard is a view of it
        sharded     full ░░░░░░░░   shard ▓▓           ░ allocated between `allocate` and `free`

    Views of a full tensor stay valid while its memory is freed and allocated again; meanwhile nothing may access them.

    Attributes:
        full: flat tensors, one per bucket.
        shards: this rank's shards of them.
        is_kept_full: for each bucket, whether it is never freed.
        is_allocated: for each bucket, whether the full tensor has memory.
        overwritten, added: for each bucket of gradients, the views that layers may overwrite, and the rest, which needs zeros.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.full: list[Tensor] = []
        self.shards: list[Tensor] = []
        self.is_kept_full: list[bool] = []
        self.is_allocated: list[bool] = []
        self.overwritten: list[list[tuple[FirstWrite, Tensor]]] = []
        self.added: list[list[Tensor]] = []

    def add(self, size: int, shard: slice, *, is_kept_full: bool, overwritten: FirstWrites = ()) -> None:
        """Add a bucket, zeroed and allocated, whose parts `overwritten` layers may overwrite. Call `free` once its views exist."""
        full = torch.zeros(size, dtype=self.dtype, device=self.device)
        self.full.append(full)
        self.shards.append(full[shard] if is_kept_full else full.new_zeros(full[shard].shape))
        self.is_kept_full.append(is_kept_full)
        self.is_allocated.append(True)
        self.overwritten.append([(first, full[part]) for first, part in overwritten])
        self.added.append([full[part] for part in parts_between([part for _, part in overwritten], size)])

    def allocate(self, number: int) -> None:
        """Allocate the full bucket, uninitialised, unless it has memory."""
        if not self.is_allocated[number]:
            full = self.full[number]
            full.untyped_storage().resize_(full.numel() * full.element_size())
            self.is_allocated[number] = True

    def complete(self, number: int) -> None:
        """Zero the parts that no layer wrote."""
        for first, gradient in self.overwritten[number]:
            if first.take():
                gradient.zero_()

    def free(self, number: int) -> None:
        """Free the full bucket unless it is kept, after collectives that use it: the memory's next user follows on this stream."""
        if not self.is_kept_full[number]:
            self.full[number].untyped_storage().resize_(0)
            self.is_allocated[number] = False

    @property
    def kept(self) -> list[Tensor]:
        """The memory that is always allocated: for each bucket the full tensor, or this rank's shard."""
        pairs = zip(self.full, self.shards, self.is_kept_full, strict=True)
        return [full if is_kept else shard for full, shard, is_kept in pairs]

    def zero(self) -> None:
        """Set all kept memory to zero."""
        if self.full:
            torch._foreach_zero_(self.kept)
        for first, _ in itertools.chain.from_iterable(self.overwritten):
            first.is_due = True


@dataclass(frozen=True)
class FlatBuffers:
    """The weights and gradients of one model chunk in flat buckets; see `allocate_buffers.py`."""

    registry: ParamRegistry
    buckets: list[Bucket]
    shards: list[Shard]
    """This rank's shard of each bucket."""
    buckets_of: dict[int, list[int]]
    """Numbers of the buckets that each segment uses; segments without parameters have no entry."""
    weights: BucketMemory
    gradients: BucketMemory
    """Empty where no gradients are computed."""


@dataclass(frozen=True, kw_only=True)
class DataParallelOptions:
    """How gradients and weights are communicated. Overlap does not change the result, bit for bit."""

    overlap_grad_reduce: bool = True
    """Reduce gradients concurrently with the backward pass."""
    overlap_param_gather: bool = True
    """All-gather weights concurrently with the computation."""
    grad_dtype: torch.dtype | None = None
    """Dtype in which gradients are communicated; None: the dtype of the gradient buffers."""


class DataParallel(SegmentHooks):
    """Communicates one model chunk's gradients and weights between its replicas.

    Args:
        buffers: the chunk's weights and gradients, cut for this grid.
        grid: gives the replicas of dense and of expert parameters.
    """

    def __init__(
        self, buffers: FlatBuffers, grid: RankGrid, options: DataParallelOptions = DataParallelOptions()
    ) -> None:
        super().__init__()
        self.buffers = buffers
        self.grid = grid
        families = [grid.family(bucket.family) for bucket in buffers.buckets]
        self.weights = WeightAllGather(
            buffers.weights,
            [family.shard for family in families],
            overlap=options.overlap_param_gather,
        )
        self.gradients = GradientReduction(
            buffers.gradients,
            families,
            overlap=options.overlap_grad_reduce,
            dtype=options.grad_dtype or buffers.gradients.dtype,
        )
        self._buckets_of = buffers.buckets_of
        self._upcoming: deque[SegmentPass] = deque()
        self._running: list[SegmentPass] = []

    def on_schedule(self, passes: Sequence[SegmentPass]) -> None:
        self._upcoming = deque(passes)

    def before(self, segment_pass: SegmentPass) -> None:
        """Also begin to gather the weights of the next pass."""
        expected = self._upcoming.popleft()
        assert segment_pass == expected, f"{segment_pass} runs before {expected}"
        self._running.append(segment_pass)
        own = self._buckets_of.get(segment_pass.segment, ())
        if segment_pass.computes_gradients:
            for number in own:
                self.gradients.prepare(number)
        if segment_pass.kind is not ActionKind.WEIGHT:
            for number in own:
                self.weights.wait_for(number)
            for number in self._in_use():
                self.weights.prefetch(number)

    def after(self, segment_pass: SegmentPass) -> None:
        self._running.remove(segment_pass)
        if segment_pass.kind is not ActionKind.WEIGHT:
            for number in set(self._buckets_of.get(segment_pass.segment, ())).difference(self._in_use()):
                self.buffers.weights.free(number)

    def on_gradients(self, segment: int, *, is_last: bool) -> None:
        """Backward passes run from the last segment down: the lowest-numbered segment that uses a bucket runs last and completes it."""
        for number in self._buckets_of.get(segment, ()):
            if segment == self.buffers.buckets[number].completed_by:
                self.gradients.mark_ready(number, is_last=is_last)

    def _in_use(self) -> list[int]:
        """Return the buckets of the passes that run, and of the next one that uses weights."""
        later = (one for one in self._upcoming if one.kind is not ActionKind.WEIGHT)
        passes = [*self._running, *itertools.islice(later, 1)]
        return [number for one in passes for number in self._buckets_of.get(one.segment, ())]

    def finish_gradients(self) -> None:
        """Complete all reductions over the replicas, then sum gradients that are partial sums over another group.

        Ranks of such a group hold the same boxes at the same positions of their shards, so only shards are sent.
        """
        self.gradients.finish()
        for name, partial in sorted(self._partial_sums.items()):
            total = all_reduce(torch.cat(partial), self.grid.group(name))
            torch._foreach_copy_(partial, list(total.split([part.numel() for part in partial])))

    @functools.cached_property
    def _partial_sums(self) -> dict[str, list[Tensor]]:
        """Gradients that are partial sums, by the name of their group. A model has thousands of pieces: they are searched once."""
        found: dict[str, list[Tensor]] = {}
        for shard, gradients in zip(self.buffers.shards, self.buffers.gradients.shards, strict=True):
            for piece, part in shard.pieces():
                for name in piece.grad_sum_groups:
                    found.setdefault(name, []).append(gradients[part])
        return found

    def all_gather_weights(self, number: int) -> None:
        """Begin to send a bucket to every replica, after the optimizers have written its shards."""
        self.weights.all_gather(number)

    def all_gather_all_weights(self) -> None:
        """Begin to send every bucket, after the transfers in flight."""
        self.weights.wait()
        for number in range(len(self.buffers.buckets)):
            self.weights.all_gather(number)

    def wait_for_weights(self) -> None:
        """Wait until no weights are in flight; call it before shards of weights are read or written."""
        self.weights.wait()

    def gathered_buckets(self) -> Iterator[tuple[Bucket, Tensor]]:
        """Yield each bucket with its full weights, for readers other than the executor."""
        for number, bucket in enumerate(self.buffers.buckets):
            self.weights.wait_for(number)
            yield bucket, self.buffers.weights.full[number]
            self.buffers.weights.free(number)

    def sum_over_ranks(self, number: Tensor) -> Tensor:
        """Sum a number over all ranks, in place. Each element must be counted by one rank only."""
        return all_reduce(number, self.grid.world)


class WeightAllGather:
    """All-gathers buckets of weights.

    Args:
        memory: the weights.
        groups: for each bucket, the ranks over which it is sharded.
        overlap: begin a gather early and wait when the weights are needed; else begin and wait at once.
    """

    def __init__(self, memory: BucketMemory, groups: Sequence[RankGroup], *, overlap: bool) -> None:
        self.memory = memory
        self.groups = groups
        self.overlap = overlap
        self._in_flight: dict[int, Transfer] = {}

    def all_gather(self, number: int) -> None:
        """Begin to gather a bucket whose shards have been written, if it is kept full."""
        assert number not in self._in_flight, "a shard was written while it was gathered"
        if self.memory.is_kept_full[number]:
            self._in_flight[number] = self.begin(number)
            if not self.overlap:
                self.wait_for(number)

    def prefetch(self, number: int) -> None:
        """Begin to gather a bucket that is needed soon, if it has no memory."""
        if self.overlap and not self.memory.is_allocated[number]:
            self._in_flight[number] = self.begin(number)

    def wait_for(self, number: int) -> None:
        """Make the full bucket valid for the work that follows."""
        if not self.memory.is_allocated[number]:
            self._in_flight[number] = self.begin(number)
        self._in_flight.pop(number, Transfer()).wait()

    def wait(self) -> None:
        """Wait for all buckets in flight."""
        for number in list(self._in_flight):
            self.wait_for(number)

    def begin(self, number: int) -> Transfer:
        """Allocate a bucket and begin to gather it."""
        self.memory.allocate(number)
        with record_function("gather weights"):
            full = self.memory.full[number].data  # hides the write from autograd
            return begin_all_gather_into(full, self.memory.shards[number], self.groups[number])


class GradientReduction:
    """Reduces buckets of gradients over the replicas: this rank's shard of a bucket becomes the sum.

    Args:
        memory: the gradients.
        families: for each bucket, the ranks with different shards of it, and the ranks with the same shard.
        overlap: reduce concurrently with the backward pass; else reduce after it, or wait at once.
        dtype: in which gradients are communicated.
    """

    def __init__(
        self, memory: BucketMemory, families: Sequence[FamilyGroups], *, overlap: bool, dtype: torch.dtype
    ) -> None:
        self.memory = memory
        self.families = families
        self.overlap = overlap
        self.dtype = dtype
        self._ready: list[int] = []
        self._in_flight: dict[int, Iterator[None]] = {}

    def prepare(self, number: int) -> None:
        """Make a bucket ready to accumulate gradients."""
        while number in self._in_flight:
            self._advance(number)  # the previous micro-batch
        if not self.memory.is_allocated[number]:
            self.memory.allocate(number)
            torch._foreach_zero_(self.memory.added[number])
            for first, _ in self.memory.overwritten[number]:
                first.is_due = True

    def mark_ready(self, number: int, *, is_last: bool) -> None:
        """Reduce a bucket to which all gradients of a micro-batch have been added; `is_last`: of the last one of the step."""
        if not self.memory.is_kept_full[number]:
            self.memory.complete(number)
            self._begin(number, is_last=is_last)
            while not self.overlap and self._in_flight:
                self._advance_all()
        elif is_last and self.overlap:
            self._begin(number, is_last=True)
        elif is_last:
            self._ready.append(number)

    def finish(self) -> None:
        """Complete all reductions."""
        for number in self._ready:
            self._begin(number, is_last=True)
        self._ready = []
        while self._in_flight:
            self._advance_all()

    def _begin(self, number: int, *, is_last: bool) -> None:
        is_one = self.families[number].shard.size == 1 or self.families[number].copies.size == 1
        if not (is_one and self.dtype == self.memory.dtype and self.memory.is_kept_full[number]):
            self._advance_all()  # at most two buckets have scratch memory, and the halves of reductions alternate
        self._in_flight[number] = self._reduce(number, is_last=is_last)
        self._advance(number)

    def _advance_all(self) -> None:
        for number in list(self._in_flight):  # in the order in which they began
            self._advance(number)

    def _advance(self, number: int) -> None:
        """Wait for a reduction's current transfer and begin its next one, if there is one."""
        with record_function("reduce gradients"):
            if next(self._in_flight[number], "ended") == "ended":
                del self._in_flight[number]

    def _reduce(self, number: int, *, is_last: bool) -> Iterator[None]:
        """Begin a transfer before each `yield` and wait for it afterwards."""
        own, copies = self.memory.shards[number], self.families[number].copies
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
        full, is_kept_full = self.memory.full[number], self.memory.is_kept_full[number]
        sent = full.to(self.dtype)
        is_in_place = sent is full and is_kept_full
        received = own if is_in_place else torch.empty_like(own, dtype=self.dtype)
        transfer = begin_reduce_scatter_into(received, sent, self.families[number].shard)
        yield
        transfer.wait()
        if is_kept_full and not is_in_place:
            own.copy_(received)
        if not is_kept_full:
            add_to_shard(own, received)
            self.memory.free(number)


def add_to_shard(own: Tensor, received: Tensor) -> None:
    """Add the reduced gradients of a micro-batch to this rank's shard."""
    own.add_(received)
