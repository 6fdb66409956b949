"""Tokens visit experts, which may live on other ranks, and come back.

    routing = router(x)                          which experts, with what weights
    dispatched = dispatcher.dispatch(x, routing)         rows for this rank's experts, one expert's behind the other's
    dispatcher.combine(experts(dispatched), dispatched)

    ep 2, etp 2, experts 0 to 3:     rank 0: first half of 0 and 1     rank 1: second half of 0 and 1
                                     rank 2: first half of 2 and 3     rank 3: second half of 2 and 3

Experts multiply what they give by the weights of their dispatched, so that bringing back is a sum, which keeps nothing
for its gradient. Each rank has tokens of its own, and all ranks equally many. An etp rank holds a slice of the channels
of its experts: a visitor comes to all etp ranks, and what they give is summed.

`LocalDispatcher` is for one rank. `AllGatherDispatcher` shows all tokens to all ranks: no host knows any counts, and there
is memory for all visits that could come. `AllToAllDispatcher` sends each token to the ranks of its experts only, once to
each, and what a rank's experts give to it comes back as one sum; its host waits for the counts, once a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.host_copy import HostCopy
from megatrain.kernels.moe.permute import (
    Permutation,
    permute_rows,
    permute_values,
    sort_by_expert,
    unpermute_rows,
    unpermute_values,
)
from megatrain.kernels.moe.routing import Routing
from megatrain.parallel.collectives import all_gather, begin_all_to_all_into, reduce_scatter
from megatrain.parallel.grid import RankGroup

RowsPerExpert = Callable[[int], int]
"""Rows that every expert gets, however few visit it, from the number of tokens of a rank."""


class DispatchedTokens(NamedTuple):
    """What this rank's experts work on."""

    rows: Tensor
    """[r, h], sorted by expert; rows from the last end on are never read."""
    ends: Tensor
    """Where each expert's rows end, int32 [E/ep], on the device: the `offs` of `F.grouped_mm`."""
    probs: Tensor
    """What the experts multiply their results by, [r]."""
    way: Any
    """How the exchange finds the way back."""


class TokenDispatcher(Protocol):
    """Brings tokens to experts and back, with gradients."""

    def dispatch(self, x: Tensor, routing: Routing) -> DispatchedTokens:
        """Bring this rank's tokens, [t, h], to the experts of `routing`."""

    def combine(self, out: Tensor, dispatched: DispatchedTokens) -> Tensor:
        """Sum for each token what its experts gave: [r, h] -> [t, h]."""


class LocalDispatcher:
    """For one rank: nothing travels."""

    def __init__(self, num_experts: int, rows_per_expert: RowsPerExpert | None = None) -> None:
        self.num_experts = num_experts
        self.rows_per_expert = rows_per_expert

    def dispatch(self, x: Tensor, routing: Routing) -> DispatchedTokens:
        order = sort_by_expert(
            routing.experts,
            num_experts=self.num_experts,
            num_rows=routing.experts.numel(),
            kept=routing.kept,
            rows_per_expert=_padded(self.rows_per_expert, x),
        )
        return _dispatched(x, routing.weights, order)

    def combine(self, out: Tensor, dispatched: DispatchedTokens) -> Tensor:
        return _to_tokens(out, dispatched.way)


class AllGatherDispatcher:
    """Every rank of ep and etp gets the tokens of all, and sums what its own experts give them."""

    def __init__(
        self, num_experts: int, ep: RankGroup, etp: RankGroup, rows_per_expert: RowsPerExpert | None = None
    ) -> None:
        self.own_experts = num_experts // ep.size
        self.ep, self.etp = ep, etp
        self.rows_per_expert = rows_per_expert

    def dispatch(self, x: Tensor, routing: Routing) -> DispatchedTokens:
        experts = all_gather(all_gather(_visited(routing), self.etp), self.ep)
        num_tokens, top_k = experts.shape
        order = sort_by_expert(
            experts,
            first=self.ep.rank * self.own_experts,
            num_experts=self.own_experts,
            num_rows=num_tokens * min(top_k, self.own_experts),
            rows_per_expert=_padded(self.rows_per_expert, x),
        )
        return _dispatched(self._of_all(x), self._of_all(routing.weights), order)

    def combine(self, out: Tensor, dispatched: DispatchedTokens) -> Tensor:
        return _split_sum(_split_sum(_to_tokens(out, dispatched.way), self.ep), self.etp)

    def _of_all(self, x: Tensor) -> Tensor:
        return _joined(_joined(x, self.etp), self.ep)


class AllToAllDispatcher:
    """Tokens travel over ep to the ranks of their experts, which show to their etp ranks what came.

    The host must know the counts. A plan made without memory has none, and takes all experts as equally busy.
    """

    def __init__(
        self, num_experts: int, ep: RankGroup, etp: RankGroup, rows_per_expert: RowsPerExpert | None = None
    ) -> None:
        self.num_experts, self.own_experts = num_experts, num_experts // ep.size
        self.ep, self.etp = ep, etp
        self.rows_per_expert = rows_per_expert

    def dispatch(self, x: Tensor, routing: Routing) -> DispatchedTokens:
        experts = _visited(routing)
        num_tokens, top_k = experts.shape
        ranks = torch.arange(self.ep.size, device=x.device)
        of_visits = experts.div(self.own_experts, rounding_mode="floor")
        num_visits = (of_visits[..., None] == ranks).sum(1)  # of each token to each rank
        travels = num_visits > 0
        counts = HostCopy(self._counts(torch.stack((travels.sum(0), num_visits.sum(0)), 1)))
        at_home = sort_by_expert(
            ranks.expand_as(travels),
            num_experts=self.ep.size,
            num_rows=num_tokens * min(top_k, self.ep.size),
            kept=travels,
        )
        leaving = [_ToExperts.apply(part, at_home) for part in (x, routing.weights)]
        experts = experts.index_select(0, at_home.tokens.clamp(min=0))
        known = None if x.is_meta else counts.read()  # the device is busy while the host waits
        trip = self._trip(known, num_tokens, top_k)
        rows, weights = (_joined(_travelled(part, trip), self.etp) for part in leaving)
        here = sort_by_expert(
            all_gather(_travel(experts, trip, behind=-1), self.etp),
            first=self.ep.rank * self.own_experts,
            num_experts=self.own_experts,
            num_rows=trip.visits_behind,
            rows_per_expert=_padded(self.rows_per_expert, x),
        )
        return _dispatched(rows, weights, here)._replace(way=_Way(at_home, trip, here))

    def combine(self, out: Tensor, dispatched: DispatchedTokens) -> Tensor:
        way: _Way = dispatched.way
        rows = _split_sum(_to_tokens(out, way.here), self.etp)
        return _to_tokens(_travelled(rows, way.trip.back()), way.at_home)

    def _counts(self, going: Tensor) -> Tensor:
        """Tokens and visits for each rank of ep, then those that come from each, to each of etp: [1 + etp, ep, 2].

        Args:
            going: [ep, 2].
        """
        coming = torch.empty_like(going)
        begin_all_to_all_into(coming, going, self.ep).wait()
        return torch.cat((going[None], all_gather(coming[None], self.etp)))

    def _trip(self, counts: list[list[Any]] | None, num_tokens: int, top_k: int) -> _Trip:
        """What the host must know; by an even load where it has no counts."""
        to_ranks, *from_ranks = counts or [self._even(num_tokens, top_k)] * (1 + self.etp.size)
        arriving = [sum(tokens for tokens, _ in each) for each in from_ranks]
        return _Trip(
            self.ep,
            [tokens for tokens, _ in to_ranks],
            [tokens for tokens, _ in from_ranks[self.etp.rank]],
            rows_before=num_tokens * min(top_k, self.ep.size),
            rows_behind=max(*arriving, 1),
            visits_behind=max(sum(visits for each in from_ranks for _, visits in each), 1),
        )

    def _even(self, num_tokens: int, top_k: int) -> list[tuple[int, int]]:
        """Tokens and visits between two ranks where all experts are equally busy."""
        elsewhere = math.comb(self.num_experts - self.own_experts, top_k) / math.comb(self.num_experts, top_k)
        visits = max(num_tokens * top_k // self.ep.size, 1)
        return [(max(round(num_tokens * (1 - elsewhere)), 1), visits)] * self.ep.size


@dataclass(frozen=True)
class _Trip:
    """How many rows travel to and from each rank."""

    group: RankGroup
    to_ranks: list[int]
    from_ranks: list[int]
    rows_before: int
    """Rows that there is memory for before the trip, and behind it; those that do not travel are never read."""
    rows_behind: int
    visits_behind: int = 0
    """Of what came to all etp ranks, to this rank's experts."""

    def back(self) -> _Trip:
        return _Trip(self.group, self.from_ranks, self.to_ranks, self.rows_behind, self.rows_before)


class _Way(NamedTuple):
    """Both orders that rows were in, and the trip between them."""

    at_home: Permutation
    trip: _Trip
    here: Permutation


def _visited(routing: Routing) -> Tensor:
    """Numbers of each token's experts, -1 where it is dropped: int64 [t, k]."""
    return routing.experts if routing.kept is None else routing.experts.masked_fill(~routing.kept, -1)


def _padded(rows_per_expert: RowsPerExpert | None, x: Tensor) -> int | None:
    return None if rows_per_expert is None else rows_per_expert(x.shape[0])


def _dispatched(x: Tensor, weights: Tensor, order: Permutation) -> DispatchedTokens:
    rows: Tensor = _ToExperts.apply(x, order)
    row_weights: Tensor = _NumbersToExperts.apply(weights, order)
    return DispatchedTokens(rows, order.ends, row_weights, order)


def _to_tokens(rows: Tensor, order: Permutation) -> Tensor:
    out: Tensor = _ToTokens.apply(rows, order)
    return out


def _joined(x: Tensor, group: RankGroup) -> Tensor:
    """The rows of all ranks."""
    if group.size == 1:
        return x
    out: Tensor = _Joined.apply(x, group)
    return out


def _split_sum(x: Tensor, group: RankGroup) -> Tensor:
    """Summed over the ranks, of which each keeps its rows."""
    if group.size == 1:
        return x
    out: Tensor = _SplitSum.apply(x, group)
    return out


def _travelled(x: Tensor, trip: _Trip) -> Tensor:
    out: Tensor = _Travelled.apply(x, trip)
    return out


class _ToExperts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Permutation) -> Tensor:
        ctx.order = order
        return permute_rows(x, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return unpermute_rows(grads[0], ctx.order), None


class _ToTokens(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Permutation) -> Tensor:
        ctx.order = order
        return unpermute_rows(rows, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return permute_rows(grads[0], ctx.order), None


class _NumbersToExperts(Function):
    @staticmethod
    def forward(ctx: Any, numbers: Tensor, order: Permutation) -> Tensor:
        ctx.order = order
        return permute_values(numbers, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return unpermute_values(grads[0], ctx.order), None


class _Joined(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grads[0], ctx.group), None


class _SplitSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather(grads[0], ctx.group), None


class _Travelled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return _travel(x, trip)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _travel(grads[0], ctx.trip.back()), None


def _travel(x: Tensor, trip: _Trip, *, behind: int | None = None) -> Tensor:
    """What the others send; behind it rows that hold anything, or this."""
    leaving = x[: sum(trip.to_ranks)].contiguous()
    out = x.new_empty(trip.rows_behind, *x.shape[1:])
    arriving = out[: sum(trip.from_ranks)]
    begin_all_to_all_into(
        arriving, leaving, trip.group, to_ranks=trip.to_ranks, from_ranks=trip.from_ranks
    ).wait()
    if behind is not None:
        out[len(arriving) :] = behind
    return out
