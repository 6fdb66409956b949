"""Expert parallelism: dispatches tokens to the ranks of their experts and combines the results.

    finish = dispatcher.begin_dispatch(x, route)      route returns each token's experts and probabilities
    dispatched = finish()                             rows for this rank's experts, sorted by expert
    finish = dispatcher.begin_combine(experts(dispatched), dispatched)
    out = finish()

    ep 2, etp 2, experts 0 to 3:     rank 0: first half of 0 and 1     rank 1: second half of 0 and 1
                                     rank 2: first half of 2 and 3     rank 3: second half of 2 and 3

Experts multiply their outputs by the routing probabilities, so that combining is a plain sum and saves no activations.
Each rank has different tokens, all ranks equally many. An etp rank holds a slice of its experts' channels: an assigned
token is sent to all etp ranks, and their outputs are summed.

`LocalDispatcher` serves one rank. `AllToAllDispatcher` sends each token once to each rank with one of its experts and
receives one sum from it; all ranks gather the experts and probabilities of all tokens before, so that the rows are all
that an all-to-all sends. The host waits for the counts once per call. `AllGatherDispatcher` gathers all tokens on all
ranks: the host needs no counts, and memory holds every possible assignment, or those within a `RankCapacity`. With one etp
rank, deterministic operations give both the same bits.

Communication overlaps the router, the shared expert and weight gradients: see `RowTransfer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.host_copy import HostCopy
from megatrain.kernels.moe.permute import (
    Permutation,
    PermuteRows,
    PermuteValues,
    UnpermuteRows,
    sort_by_expert,
    sort_by_rank,
    sort_by_source,
)
from megatrain.kernels.moe.routing import Routing
from megatrain.parallel.collectives import (
    Transfer,
    all_gather,
    begin_all_gather,
    begin_all_to_all_into,
    begin_reduce_scatter,
    reduce_scatter,
)
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.rank_capacity import RankCapacity
from megatrain.parallel.tensor_overlap.ordered_sums import begin_ordered_sum
from megatrain.parallel.tensor_parallel import all_gather_rows, reduce_scatter_rows


@dataclass(frozen=True)
class ExpertParallel:
    """The ranks over which the experts of a layer are split."""

    ep: RankGroup
    """Ranks with different experts."""
    etp: RankGroup
    """Ranks that hold a slice of each expert's inner channels."""

    def own(self, num_experts: int) -> range:
        """Return the indices of the experts that this rank holds."""
        each = num_experts // self.ep.size
        return range(self.ep.rank * each, (self.ep.rank + 1) * each)


RowsPerExpert = Callable[[int], int]
"""Maps a rank's number of tokens to the fixed number of rows of every expert (padded to capacity)."""


class DispatchedTokens(NamedTuple):
    """The input of this rank's experts."""

    rows: Tensor
    """[r, h], sorted by expert; rows after the last end are never read."""
    ends: Tensor
    """End of each expert's rows, int32 [E/ep], on the device: the `offs` of `F.grouped_mm`."""
    probs: Tensor
    """Routing probabilities [r], by which experts multiply their outputs."""
    state: Any
    """The dispatcher's state for `begin_combine`."""
    transfer: RowTransfer | None = None
    """The last collective that sent the rows; None: none."""
    overlapped: tuple[Callable[[], None], ...] = ()
    """Work of the backward pass, done while the gradient of the sums is sent."""


FinishDispatch = Callable[[], DispatchedTokens]
"""Ends a dispatch; the host may wait for counts, while the device has the work that was queued before the call."""


class TokenDispatcher(Protocol):
    """Sends tokens to experts and combines the results, differentiably."""

    overlaps_combine: bool
    """Work on all tokens, such as a shared expert, belongs between begin and end of combine; False: of dispatch."""

    def begin_dispatch(self, x: Tensor, route: Callable[[], Routing]) -> FinishDispatch:
        """Begin to send this rank's tokens, [t, h], to the experts that `route` returns."""

    def begin_combine(self, out: Tensor, dispatched: DispatchedTokens) -> Callable[[], Tensor]:
        """Begin to sum the experts' outputs of each token; the result returns the sums: [r, h] -> [t, h]."""


class LocalDispatcher:
    """Dispatches within one rank."""

    overlaps_combine = False

    def __init__(self, num_experts: int, rows_per_expert: RowsPerExpert | None = None) -> None:
        self.num_experts = num_experts
        self.rows_per_expert = rows_per_expert

    def begin_dispatch(self, x: Tensor, route: Callable[[], Routing]) -> FinishDispatch:
        routing = route()
        permutation = sort_by_expert(
            routing.experts,
            num_experts=self.num_experts,
            num_rows=routing.experts.numel(),
            kept=routing.kept,
            rows_per_expert=_num_padded(self.rows_per_expert, x),
        )
        return lambda: _permuted(x, routing.probs, permutation)

    def begin_combine(self, out: Tensor, dispatched: DispatchedTokens) -> Callable[[], Tensor]:
        return lambda: _unpermuted(out, dispatched.state)


class AllGatherDispatcher:
    """Gathers the tokens of all ranks of ep and etp, and sums the outputs of this rank's experts.

    Args:
        capacity: bounds the memory of assignments without `rows_per_expert`; None: it holds every possible one.
    """

    overlaps_combine = True

    def __init__(
        self,
        num_experts: int,
        ep: RankGroup,
        etp: RankGroup,
        rows_per_expert: RowsPerExpert | None = None,
        give_turn: Callable[[], None] | None = None,
        capacity: RankCapacity | None = None,
    ) -> None:
        self.num_experts, self.own_experts = num_experts, num_experts // ep.size
        self.ep, self.etp = ep, etp
        self.rows_per_expert, self.give_turn, self.capacity = rows_per_expert, give_turn, capacity

    def begin_dispatch(self, x: Tensor, route: Callable[[], Routing]) -> FinishDispatch:
        tokens = RowTransfer(self._begin_gather, self._begin_reduction, self.give_turn)
        own = tokens.begin(x)
        finish_routing = self._begin_routing_gather(route())

        def finish() -> DispatchedTokens:
            rows = tokens.finish(own)  # first, so that its gradient is sent after that of the probabilities
            experts, probs = finish_routing()
            return _permuted(rows, probs, self._sort_own(experts, x), tokens)

        return finish

    def begin_combine(self, out: Tensor, dispatched: DispatchedTokens) -> Callable[[], Tensor]:
        sums = RowTransfer(
            self._begin_reduction, self._begin_gather, self.give_turn, [*dispatched.overlapped]
        )
        own = sums.begin(_unpermuted(out, dispatched.state))
        return lambda: sums.finish(own)

    def _begin_routing_gather(self, routing: Routing) -> Callable[[], tuple[Tensor, Tensor]]:
        """Begin to gather the experts and probabilities of the tokens of all ranks of ep and etp, in one collective.

        Returns:
            A function that returns experts, integers [ep * etp * t, k], -1 for dropped assignments, and probabilities.
        """
        probs, experts = routing.probs, routing.kept_experts
        same_size = {2: torch.int16, 4: torch.int32, 8: torch.int64}[probs.element_size()]
        bits = experts.to(same_size).view(probs.dtype)
        both = RowTransfer(lambda x: self._begin_gather(torch.cat((x, bits), dim=1)), self._begin_reduction)
        own = both.begin(probs)

        def finish() -> tuple[Tensor, Tensor]:
            all_probs = both.finish(own)
            assert both.appended is not None
            return both.appended.view(same_size), all_probs

        return finish

    def _begin_gather(self, x: Tensor) -> tuple[Tensor, Transfer]:
        """Begin to gather over etp and ep; of two gathers the first is complete."""
        if self.ep.size == 1:
            return begin_all_gather(x, self.etp)
        return begin_all_gather(all_gather(x, self.etp), self.ep)

    def _begin_reduction(self, x: Tensor) -> tuple[Tensor, Transfer]:
        """Begin to sum over ep and etp and keep this rank's rows; of two sums the first is complete."""
        if self.etp.size == 1:
            is_ordered = torch.are_deterministic_algorithms_enabled()
            return (begin_ordered_sum if is_ordered else begin_reduce_scatter)(x, self.ep)
        return begin_reduce_scatter(reduce_scatter(x, self.ep), self.etp)

    def _sort_own(self, experts: Tensor, x: Tensor, token_rows: Tensor | None = None) -> Permutation:
        """Sort the assignments of all tokens to this rank's experts.

        Args:
            x: the tokens of this rank.
            token_rows: see `sort_by_expert`.
        """
        num_tokens, top_k = experts.shape
        num_rows = num_tokens * min(top_k, self.own_experts)
        if self.capacity is not None:
            num_rows = self.capacity.num_rows(num_tokens * top_k // self.ep.size, num_rows)
        found = sort_by_expert(
            experts,
            first_expert=self.ep.rank * self.own_experts,
            num_experts=self.own_experts,
            num_rows=num_rows,
            rows_per_expert=_num_padded(self.rows_per_expert, x),
            token_rows=None if token_rows is None else token_rows.flatten(),
        )
        if self.capacity is not None:
            self.capacity.record(found.load, num_rows)
        return found


class AllToAllDispatcher(AllGatherDispatcher):
    """Sends tokens over ep to the ranks of their experts, which gather the received tokens over etp.

    The host must know the counts. A dry run has none, and assumes that all experts have the same load.
    """

    overlaps_combine = False  # the device needs work while the host waits

    def begin_dispatch(self, x: Tensor, route: Callable[[], Routing]) -> FinishDispatch:
        routing = route()
        experts = routing.kept_experts
        by_rank = sort_by_rank(experts, num_ranks=self.ep.size, experts_per_rank=self.own_experts)
        gathered, probs = self._begin_routing_gather(routing)()
        by_source = self._sort_by_source(gathered)
        by_expert = self._sort_own(gathered, x, by_source.rows)
        counts = HostCopy(torch.cat((by_rank.ends, by_source.ends, by_expert.ends[-1:])))
        outgoing = PermuteRows.apply(x, by_rank)

        def finish() -> DispatchedTokens:
            splits = self._splits(None if x.is_meta else counts.read(), *experts.shape)
            sent = RowTransfer(splits.begin, splits.reversed().begin, self.give_turn)
            own_rows = sent.begin(outgoing)
            received, own = by_source, by_expert
            if self.etp.size > 1:  # the rows of the etp ranks are padded to the most that one of them has
                received = self._sort_by_source(gathered, splits.rows_after)
                own = self._sort_own(gathered, x, received.rows)
            rows = all_gather_rows(sent.finish(own_rows), self.etp)
            received = received._replace(assignments=received.assignments[: len(rows)])
            own = own._replace(
                rows=own.rows[: len(rows)], assignments=own.assignments[: splits.num_assignments]
            )
            dispatched = _permuted(rows, PermuteRows.apply(probs, received), own, sent)
            return dispatched._replace(state=DispatchState(by_rank, splits, own))

        return finish

    def begin_combine(self, out: Tensor, dispatched: DispatchedTokens) -> Callable[[], Tensor]:
        state: DispatchState = dispatched.state
        returned = RowTransfer(state.splits.reversed().begin, state.splits.begin, self.give_turn)
        own = returned.begin(reduce_scatter_rows(_unpermuted(out, state.by_expert), self.etp))
        return lambda: _unpermuted(returned.finish(own), state.by_rank)

    def _sort_by_source(self, gathered: Tensor, rows_per_etp: int | None = None) -> Permutation:
        """Sort the tokens of all ranks that this rank receives, in the order of their rows."""
        return sort_by_source(
            gathered,
            (self.ep.size, self.etp.size),
            first_expert=self.ep.rank * self.own_experts,
            num_experts=self.own_experts,
            rows_per_etp=rows_per_etp,
        )

    def _splits(self, ends: list[int] | None, num_tokens: int, top_k: int) -> AllToAllSplits:
        """Return the splits; None: those of an even load.

        Args:
            ends: of the tokens sent to each ep rank; of those received from each rank, [etp, ep]; of the assignments to own experts.
        """
        ep, etp = self.ep.size, self.etp.size
        if ends is None:
            tokens, num_assignments = self._even_counts(num_tokens, top_k)
            to_ranks, from_ranks = [tokens] * ep, [tokens] * ep * etp
        else:
            to_ranks, from_ranks = _differences(ends[:ep]), _differences(ends[ep:-1])
            num_assignments = ends[-1]
        by_etp = [from_ranks[number * ep : (number + 1) * ep] for number in range(etp)]
        return AllToAllSplits(
            self.ep,
            to_ranks,
            by_etp[self.etp.rank],
            rows_before=num_tokens * min(top_k, ep),
            rows_after=max(*(sum(each) for each in by_etp), 1),
            num_assignments=max(num_assignments, 1),
        )

    def _even_counts(self, num_tokens: int, top_k: int) -> tuple[int, int]:
        """Return tokens between two ranks and assignments to this rank if all experts have the same load."""
        elsewhere = math.comb(self.num_experts - self.own_experts, top_k) / math.comb(self.num_experts, top_k)
        return max(round(num_tokens * (1 - elsewhere)), 1), num_tokens * top_k * self.etp.size


@dataclass(frozen=True)
class AllToAllSplits:
    """Numbers of rows that an all-to-all sends to and receives from each rank."""

    group: RankGroup
    to_ranks: list[int]
    from_ranks: list[int]
    rows_before: int
    """Allocated rows before and after the all-to-all; rows that are not sent are never read."""
    rows_after: int
    num_assignments: int = 0
    """Assignments of the tokens that all etp ranks received to this rank's experts; the fewest rows of these is 1."""

    def reversed(self) -> AllToAllSplits:
        return AllToAllSplits(self.group, self.from_ranks, self.to_ranks, self.rows_after, self.rows_before)

    def begin(self, x: Tensor) -> tuple[Tensor, Transfer]:
        """Begin to send rows; returns the received rows, then uninitialised rows."""
        outgoing = x[: sum(self.to_ranks)].contiguous()
        out = x.new_empty(self.rows_after, *x.shape[1:])
        incoming = out[: sum(self.from_ranks)]
        return out, begin_all_to_all_into(
            incoming, outgoing, self.group, to_ranks=self.to_ranks, from_ranks=self.from_ranks
        )


class DispatchState(NamedTuple):
    """The two permutations of an all-to-all dispatch, of own and of received tokens, and the splits between them."""

    by_rank: Permutation
    splits: AllToAllSplits
    by_expert: Permutation


def _differences(ends: list[int]) -> list[int]:
    """Return the lengths of consecutive ranges from their ends."""
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _num_padded(rows_per_expert: RowsPerExpert | None, x: Tensor) -> int | None:
    return None if rows_per_expert is None else rows_per_expert(x.shape[0])


def _permuted(
    x: Tensor, probs: Tensor, permutation: Permutation, transfer: RowTransfer | None = None
) -> DispatchedTokens:
    rows: Tensor = PermuteRows.apply(x, permutation)
    row_probs: Tensor = PermuteValues.apply(probs, permutation)
    return DispatchedTokens(rows, permutation.ends, row_probs, permutation, transfer)


def _unpermuted(rows: Tensor, permutation: Permutation) -> Tensor:
    out: Tensor = UnpermuteRows.apply(rows, permutation)
    return out


BeginTransfer = Callable[[Tensor], tuple[Tensor, Transfer]]
"""Begins a collective; the result must not be read before the wait."""


@dataclass(eq=False)
class RowTransfer:
    """A collective of rows [n, c], and in the backward pass its conjugate; both overlap the work between `begin` and `finish`.

                        forward pass                    backward pass
    x = begin(x)        begin the collective            wait for the gradient of x
    y = finish(x)       wait and return the rows        begin the conjugate, then do the deferred work
    """

    forward: BeginTransfer
    backward: BeginTransfer
    give_turn: Callable[[], None] | None = None
    """Called before a wait: lets another pass run meanwhile."""
    deferred: list[Callable[[], None]] = field(default_factory=list)
    """Work of the backward pass, done while the gradient is sent."""
    appended: Tensor | None = None
    """Received columns that `forward` appended to those of x; they have no gradient."""
    out: Tensor | None = None
    pending: Transfer = field(default_factory=Transfer)

    def begin(self, x: Tensor) -> Tensor:
        """Begin to send x; returns x, for `finish` only."""
        out: Tensor = _BeginTransfer.apply(x, self)
        return out

    def finish(self, x: Tensor) -> Tensor:
        """Return the received rows."""
        out: Tensor = _FinishTransfer.apply(x, self)
        return out

    def start(self, begin: BeginTransfer, x: Tensor) -> Tensor:
        out, self.pending = begin(x.detach())
        return out

    def wait(self) -> None:
        if self.give_turn is not None:
            self.give_turn()
        self.pending.wait()


class _BeginTransfer(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: RowTransfer) -> Tensor:
        ctx.transfer = transfer
        transfer.out = transfer.start(transfer.forward, x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.wait()
        return grads[0], None


class _FinishTransfer(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: RowTransfer) -> Tensor:
        ctx.transfer, columns = transfer, x.shape[1]
        transfer.wait()
        out, transfer.out = transfer.out, None
        assert out is not None, "begin comes first"
        if out.shape[1] == columns:
            return out
        transfer.appended = out[:, columns:].contiguous()
        return out[:, :columns].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        dx = ctx.transfer.start(ctx.transfer.backward, grads[0])
        while ctx.transfer.deferred:
            ctx.transfer.deferred.pop(0)()
        return dx, None
