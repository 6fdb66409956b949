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
receives one sum from it, or in two steps once to each host, whose ranks forward it and return one sum; all ranks gather the
experts and probabilities of all tokens before, so that the rows, or their FP8 codes, are all that an all-to-all sends. The
host waits for the counts once per call. `AllGatherDispatcher` gathers all tokens on all
ranks: the host needs no counts, and memory holds every possible assignment, or those within a `RankCapacity`. With one etp
rank, deterministic operations give both the same bits, if the all-to-all has one step.

Communication overlaps the router, the shared expert and weight gradients: see `RowTransfer`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.conjugate import Conjugate
from megatrain.kernels.fp8.rows import cast_rows, decode_rows, pack_rows, unpack_rows
from megatrain.kernels.host_copy import HostCopy
from megatrain.kernels.moe.dispatch_steps import StepRows, ends_of, even_ends, rows_of, sort_steps
from megatrain.kernels.moe.permute import (
    Permutation,
    permute_rows,
    permute_values,
    sort_by_expert,
    sort_by_source,
    unpermute_rows,
    unpermute_values,
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


@dataclass(frozen=True)
class ExpertParallel:
    """The ranks over which the experts of a layer are split."""

    ep: RankGroup
    """Ranks with different experts."""
    etp: RankGroup
    """Ranks that hold a slice of each expert's inner channels."""
    steps: tuple[RankGroup, ...]
    """Groups that an all-to-all of tokens crosses in turn: see `RankGrid.ep_steps`."""

    def own(self, num_experts: int) -> range:
        """Return the indices of the experts that this rank holds."""
        each = num_experts // self.ep.size
        return range(self.ep.rank * each, (self.ep.rank + 1) * each)


Deferred = list[Callable[[], None]]
"""Work of the backward pass, done while a gradient is sent."""
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
    deferred: Deferred | None = None
    """Done while the gradient of the rows is sent; None: it is not sent."""
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
        self.gathers: tuple[RankGroup, ...] = (etp, ep)
        """Groups over which all tokens are gathered; the ranks of the first are innermost."""
        self.rows_per_expert, self.give_turn, self.capacity = rows_per_expert, give_turn, capacity

    def begin_dispatch(self, x: Tensor, route: Callable[[], Routing]) -> FinishDispatch:
        tokens = RowTransfer(self._begin_gather, self._begin_reduction, self.give_turn)
        own = tokens.begin(x)
        finish_routing = self._begin_routing_gather(route())

        def finish() -> DispatchedTokens:
            rows = tokens.finish(own)  # first, so that its gradient is sent after that of the probabilities
            experts, probs = finish_routing()
            return _permuted(rows, probs, self._sort_own(experts, x), tokens.deferred)

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
        """Begin to gather over all ranks; of several gathers only the last is not complete."""
        *first, last = [group for group in self.gathers if group.size > 1] or [self.ep]
        for group in first:
            x = all_gather(x, group)
        return begin_all_gather(x, last)

    def _begin_reduction(self, x: Tensor) -> tuple[Tensor, Transfer]:
        """Begin to sum over all ranks and keep this rank's rows; of several sums only the last is not complete."""
        last, *first = [group for group in self.gathers if group.size > 1] or [self.ep]
        for group in reversed(first):
            x = reduce_scatter(x, group)
        is_ordered = torch.are_deterministic_algorithms_enabled() and not first
        return (begin_ordered_sum if is_ordered else begin_reduce_scatter)(x, last)

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

    A token's sum has a fixed order, and each of its sums is rounded once: a rank adds its experts in the order of the router,
    then a host its ranks in rank order, if there are two steps, then the token's rank the hosts or ranks that it has sent to.

    Args:
        steps: the groups that a token crosses in turn: see `ExpertParallel.steps`.
        in_fp8: tokens, and gradients of sums, are sent as FP8 codes with a scale per row; sums, and gradients of tokens, as they are.
    """

    overlaps_combine = False  # the device needs work while the host waits

    def __init__(
        self,
        num_experts: int,
        ep: RankGroup,
        etp: RankGroup,
        rows_per_expert: RowsPerExpert | None = None,
        give_turn: Callable[[], None] | None = None,
        *,
        steps: tuple[RankGroup, ...],
        in_fp8: bool = False,
    ) -> None:
        super().__init__(num_experts, ep, etp, rows_per_expert, give_turn)
        self.steps, self.gathers, self.in_fp8 = steps, (*steps, self.etp), in_fp8

    def begin_dispatch(self, x: Tensor, route: Callable[[], Routing]) -> FinishDispatch:
        routing = route()
        gathered, probs = self._begin_routing_gather(routing)()
        steps = sort_steps(gathered, self.num_experts, self.steps, self.etp)
        by_expert = self._sort_own(gathered, x, steps[-1].by_source.rows)
        counts = HostCopy(ends_of(steps, by_expert))
        outgoing = self._outgoing(x.detach(), steps[0].by_rank)
        deferred: Deferred = []

        def finish() -> DispatchedTokens:
            even = (steps, routing.experts, self.num_experts, self.etp)
            ends = even_ends(*even) if x.is_meta else counts.read()
            all_rows = rows_of(steps, ends, self.etp)
            received, own = steps[-1].by_source, by_expert
            if self.etp.size > 1:  # the rows of the etp ranks are padded to the most that one of them has
                received = sort_by_source(
                    gathered,
                    self.etp.size,
                    first_expert=self.ep.rank * self.own_experts,
                    num_experts=self.own_experts,
                    rows_per_source=all_rows[-1].num_received,
                )
                own = self._sort_own(gathered, x, received.rows)
            num_rows = all_rows[-1].num_received * self.etp.size
            received = received._replace(assignments=received.assignments[:num_rows])
            own = own._replace(rows=own.rows[:num_rows], assignments=own.assignments[: max(ends[-1], 1)])
            rows = Conjugate.apply(
                lambda x: self._send(outgoing, all_rows, x.dtype),
                lambda dy: self._sum(dy, all_rows, deferred),
                x,
            )
            dispatched = _permuted(rows, _permuted_rows(probs, received), own, deferred)
            return dispatched._replace(state=(all_rows, own))

        return finish

    def begin_combine(self, out: Tensor, dispatched: DispatchedTokens) -> Callable[[], Tensor]:
        all_rows, own = dispatched.state

        def send_gradient(dy: Tensor) -> Tensor:
            return self._send(self._outgoing(dy, all_rows[0].by_rank), all_rows, dy.dtype)

        sums = _unpermuted(out, own)
        return lambda: Conjugate.apply(lambda rows: self._sum(rows, all_rows, []), send_gradient, sums)

    def _outgoing(self, x: Tensor, by_rank: Permutation) -> Tensor:
        """Return the rows of the first step: those of x, [t, h], or their codes."""
        return permute_rows(pack_rows(cast_rows(x)) if self.in_fp8 else x, by_rank)

    def _send(self, outgoing: Tensor, all_rows: list[StepRows], dtype: torch.dtype) -> Tensor:
        """Send rows through all steps; returns those of all etp ranks, in `dtype`."""
        rows = outgoing
        for number, (group, step) in enumerate(zip(self.steps, all_rows, strict=True)):
            rows = permute_rows(rows, step.by_rank) if number else rows
            rows = self._all_to_all(rows, group, step, [])
        rows = all_gather(rows, self.etp)
        return decode_rows(unpack_rows(rows), dtype) if self.in_fp8 else rows

    def _sum(self, rows: Tensor, all_rows: list[StepRows], deferred: Deferred) -> Tensor:
        """Return the sums of tokens on this rank through all steps, where they are summed again: [n, h] -> [t, h]."""
        rows = reduce_scatter(rows, self.etp)
        for group, step in [*zip(self.steps, all_rows, strict=True)][::-1]:
            rows = self._all_to_all(rows, group, step.returned, deferred)
            rows = unpermute_rows(rows, step.by_rank)
        return rows

    def _all_to_all(self, x: Tensor, group: RankGroup, step: StepRows, deferred: Deferred) -> Tensor:
        """Send the rows of a step while `deferred` is done; returns the received rows, then uninitialised rows."""
        outgoing, out = x[: sum(step.to_ranks)].contiguous(), x.new_empty(step.num_received, *x.shape[1:])
        sizes = {"to_ranks": step.to_ranks, "from_ranks": step.from_ranks}
        transfer = begin_all_to_all_into(out[: sum(step.from_ranks)], outgoing, group, **sizes)
        while deferred:
            deferred.pop(0)()
        if self.give_turn is not None:
            self.give_turn()
        transfer.wait()
        return out


def _num_padded(rows_per_expert: RowsPerExpert | None, x: Tensor) -> int | None:
    return None if rows_per_expert is None else rows_per_expert(x.shape[0])


def _permuted(
    x: Tensor, probs: Tensor, permutation: Permutation, deferred: Deferred | None = None
) -> DispatchedTokens:
    rows = _permuted_rows(x, permutation)
    row_probs = Conjugate.apply(
        lambda probs: permute_values(probs, permutation),
        lambda drow_probs: unpermute_values(drow_probs, permutation),
        probs,
    )
    return DispatchedTokens(rows, permutation.ends, row_probs, permutation, deferred)


def _permuted_rows(x: Tensor, permutation: Permutation) -> Tensor:
    rows: Tensor = Conjugate.apply(
        lambda x: permute_rows(x, permutation), lambda dy: unpermute_rows(dy, permutation), x
    )
    return rows


def _unpermuted(rows: Tensor, permutation: Permutation) -> Tensor:
    out: Tensor = Conjugate.apply(
        lambda rows: unpermute_rows(rows, permutation), lambda dy: permute_rows(dy, permutation), rows
    )
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
    deferred: Deferred = field(default_factory=list)
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
