"""Expert parallelism: dispatches tokens to the ranks of their experts, runs the experts' grouped MLP, combines the results.

    routing = router(x)                                        experts and probabilities of each token
    finish = dispatcher.begin_dispatch(x, routing)             work that comes next hides the wait for the counts
    dispatched = finish()                                      rows for this rank's experts, sorted by expert
    out = grouped_mlp(dispatched, fc1, fc2, activation, info)
    dispatcher.combine(out, dispatched)

    ep 2, etp 2, experts 0 to 3:     rank 0: first half of 0 and 1     rank 1: second half of 0 and 1
                                     rank 2: first half of 2 and 3     rank 3: second half of 2 and 3

Experts multiply their outputs by the routing probabilities, so that combining is a plain sum and saves no activations.
Each rank has different tokens, all ranks equally many. An etp rank holds a slice of its experts' channels: an assigned
token is sent to all etp ranks, and their outputs are summed.

`LocalDispatcher` serves one rank. `AllGatherDispatcher` gathers all tokens on all ranks: the host needs no counts, and
memory holds every possible assignment. `AllToAllDispatcher` sends each token once to each rank with one of its experts
and receives one sum from it; all ranks gather the experts and probabilities of all tokens before, so that the rows are
all that an all-to-all sends. The host waits for the counts once per call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.activations import Activation, activate_weighted, activate_weighted_backward
from megatrain.kernels.host_copy import HostCopy
from megatrain.kernels.moe.grouped_bias import (
    accumulate_grouped_bias_gradient,
    add_grouped_bias,
    grouped_bias_weight_gradient,
)
from megatrain.kernels.moe.grouped_gemm import (
    accumulate_grouped_weight_gradient,
    grouped_gemm,
    grouped_gemm_backward,
)
from megatrain.kernels.moe.permute import (
    Permutation,
    PermuteRows,
    UnpermuteRows,
    permute_values,
    sort_by_expert,
    sort_by_rank,
    sort_by_source,
    unpermute_values,
)
from megatrain.kernels.moe.routing import Routing
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.collectives import all_gather, begin_all_to_all_into
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.tensor_parallel import Bias, all_gather_rows, reduce_scatter_rows


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
    """The dispatcher's state for `combine`."""


FinishDispatch = Callable[[], DispatchedTokens]
"""Ends a dispatch; the host may wait for counts, while the device has the work that was queued before the call."""


class TokenDispatcher(Protocol):
    """Sends tokens to experts and combines the results, differentiably."""

    def begin_dispatch(self, x: Tensor, routing: Routing) -> FinishDispatch:
        """Begin to send this rank's tokens, [t, h], to their experts."""

    def combine(self, out: Tensor, dispatched: DispatchedTokens) -> Tensor:
        """Sum the experts' outputs of each token: [r, h] -> [t, h]."""


class LocalDispatcher:
    """Dispatches within one rank."""

    def __init__(self, num_experts: int, rows_per_expert: RowsPerExpert | None = None) -> None:
        self.num_experts = num_experts
        self.rows_per_expert = rows_per_expert

    def begin_dispatch(self, x: Tensor, routing: Routing) -> FinishDispatch:
        permutation = sort_by_expert(
            routing.experts,
            num_experts=self.num_experts,
            num_rows=routing.experts.numel(),
            kept=routing.kept,
            rows_per_expert=_num_padded(self.rows_per_expert, x),
        )
        return lambda: _permuted(x, routing.probs, permutation)

    def combine(self, out: Tensor, dispatched: DispatchedTokens) -> Tensor:
        return _unpermuted(out, dispatched.state)


class AllGatherDispatcher:
    """Gathers the tokens of all ranks of ep and etp, and sums the outputs of this rank's experts."""

    def __init__(
        self, num_experts: int, ep: RankGroup, etp: RankGroup, rows_per_expert: RowsPerExpert | None = None
    ) -> None:
        self.num_experts, self.own_experts = num_experts, num_experts // ep.size
        self.ep, self.etp = ep, etp
        self.rows_per_expert = rows_per_expert

    def begin_dispatch(self, x: Tensor, routing: Routing) -> FinishDispatch:
        by_expert = self._sort_own(self._gathered_experts(_kept_experts(routing)), x)
        rows, probs = self._gathered(x), self._gathered(routing.probs)
        return lambda: _permuted(rows, probs, by_expert)

    def combine(self, out: Tensor, dispatched: DispatchedTokens) -> Tensor:
        rows = _unpermuted(out, dispatched.state)
        return reduce_scatter_rows(reduce_scatter_rows(rows, self.ep), self.etp)

    def _gathered_experts(self, experts: Tensor) -> Tensor:
        """Return the experts of the tokens of all ranks of ep and etp: [t, k] -> int32 [ep * etp * t, k]."""
        return all_gather(all_gather(experts.int(), self.etp), self.ep)

    def _gathered(self, x: Tensor) -> Tensor:
        return all_gather_rows(all_gather_rows(x, self.etp), self.ep)

    def _sort_own(self, experts: Tensor, x: Tensor, token_rows: Tensor | None = None) -> Permutation:
        """Sort the assignments of all tokens to this rank's experts.

        Args:
            x: the tokens of this rank.
            token_rows: see `sort_by_expert`.
        """
        num_tokens, top_k = experts.shape
        return sort_by_expert(
            experts,
            first_expert=self.ep.rank * self.own_experts,
            num_experts=self.own_experts,
            num_rows=num_tokens * min(top_k, self.own_experts),
            rows_per_expert=_num_padded(self.rows_per_expert, x),
            token_rows=None if token_rows is None else token_rows.flatten(),
        )


class AllToAllDispatcher(AllGatherDispatcher):
    """Sends tokens over ep to the ranks of their experts, which gather the received tokens over etp.

    The host must know the counts. A dry run has none, and assumes that all experts have the same load.
    """

    def begin_dispatch(self, x: Tensor, routing: Routing) -> FinishDispatch:
        experts = _kept_experts(routing)
        gathered = self._gathered_experts(experts)
        by_rank = sort_by_rank(experts, num_ranks=self.ep.size, experts_per_rank=self.own_experts)
        by_source = self._sort_by_source(gathered)
        by_expert = self._sort_own(gathered, x, by_source.rows)
        counts = HostCopy(torch.cat((by_rank.ends, by_source.ends, by_expert.ends[-1:])))
        outgoing, probs = PermuteRows.apply(x, by_rank), self._gathered(routing.probs)

        def finish() -> DispatchedTokens:
            splits = self._splits(None if x.is_meta else counts.read(), *experts.shape)
            rows = all_gather_rows(_all_to_all_rows(outgoing, splits), self.etp)
            received, own = by_source, by_expert
            if self.etp.size > 1:  # the rows of the etp ranks are padded to the most that one of them has
                received = self._sort_by_source(gathered, splits.rows_after)
                own = self._sort_own(gathered, x, received.rows)
            received = received._replace(assignments=received.assignments[: len(rows)])
            own = own._replace(
                rows=own.rows[: len(rows)], assignments=own.assignments[: splits.num_assignments]
            )
            dispatched = _permuted(rows, PermuteRows.apply(probs, received), own)
            return dispatched._replace(state=DispatchState(by_rank, splits, own))

        return finish

    def combine(self, out: Tensor, dispatched: DispatchedTokens) -> Tensor:
        state: DispatchState = dispatched.state
        rows = reduce_scatter_rows(_unpermuted(out, state.by_expert), self.etp)
        return _unpermuted(_all_to_all_rows(rows, state.splits.reversed()), state.by_rank)

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
            to_ranks, from_ranks, num_assignments = (
                [tokens] * ep,
                [tokens] * ep * etp,
                num_assignments * ep * etp,
            )
        else:
            to_ranks, from_ranks, num_assignments = (
                _differences(ends[:ep]),
                _differences(ends[ep:-1]),
                ends[-1],
            )
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
        """Return tokens and assignments between two ranks if all experts have the same load."""
        elsewhere = math.comb(self.num_experts - self.own_experts, top_k) / math.comb(self.num_experts, top_k)
        return max(round(num_tokens * (1 - elsewhere)), 1), max(num_tokens * top_k // self.ep.size, 1)


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


class DispatchState(NamedTuple):
    """The two permutations of an all-to-all dispatch, of own and of received tokens, and the splits between them."""

    by_rank: Permutation
    splits: AllToAllSplits
    by_expert: Permutation


def _kept_experts(routing: Routing) -> Tensor:
    """Return each token's experts, -1 for dropped assignments: int64 [t, k]."""
    return routing.experts if routing.kept is None else routing.experts.masked_fill(~routing.kept, -1)


def _differences(ends: list[int]) -> list[int]:
    """Return the lengths of consecutive ranges from their ends."""
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _num_padded(rows_per_expert: RowsPerExpert | None, x: Tensor) -> int | None:
    return None if rows_per_expert is None else rows_per_expert(x.shape[0])


def _permuted(x: Tensor, probs: Tensor, permutation: Permutation) -> DispatchedTokens:
    rows: Tensor = PermuteRows.apply(x, permutation)
    row_probs: Tensor = _PermuteValues.apply(probs, permutation)
    return DispatchedTokens(rows, permutation.ends, row_probs, permutation)


def _unpermuted(rows: Tensor, permutation: Permutation) -> Tensor:
    out: Tensor = UnpermuteRows.apply(rows, permutation)
    return out


def _all_to_all_rows(x: Tensor, splits: AllToAllSplits) -> Tensor:
    out: Tensor = _AllToAllRows.apply(x, splits)
    return out


class _PermuteValues(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        return permute_values(values, permutation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return unpermute_values(grads[0], ctx.permutation), None


class _AllToAllRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: AllToAllSplits) -> Tensor:
        ctx.splits = splits
        return _exchange_rows(x, splits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchange_rows(grads[0], ctx.splits.reversed()), None


def _exchange_rows(x: Tensor, splits: AllToAllSplits) -> Tensor:
    """Return the received rows, then uninitialised rows."""
    outgoing = x[: sum(splits.to_ranks)].contiguous()
    out = x.new_empty(splits.rows_after, *x.shape[1:])
    incoming = out[: sum(splits.from_ranks)]
    begin_all_to_all_into(
        incoming, outgoing, splits.group, to_ranks=splits.to_ranks, from_ranks=splits.from_ranks
    ).wait()
    return out


class GroupedWeight(NamedTuple):
    """The weights of this rank's experts and their gradient buffer (None where no gradients are kept)."""

    value: Tensor
    """[E/ep, o, i]."""
    grad: Tensor | None
    bias: Bias | None = None
    """[E/ep, o]; None: none."""


class GroupedProducts:
    """The products of rows with expert weights, in the dtype of the weights; a subclass has them in FP8."""

    def fc1(self, rows: Tensor, weight: Tensor, ends: Tensor, _info: PassInfo) -> Tensor:
        return grouped_gemm(rows, weight, ends)

    def fc2(self, rows: Tensor, weight: Tensor, ends: Tensor, _info: PassInfo) -> Tensor:
        return grouped_gemm(rows, weight, ends)

    def fc1_backward(self, dy: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return grouped_gemm_backward(dy, weight, ends)

    def fc2_backward(self, dy: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return grouped_gemm_backward(dy, weight, ends)


def grouped_mlp(
    dispatched: DispatchedTokens,
    fc1: GroupedWeight,
    fc2: GroupedWeight,
    activation: Activation,
    info: PassInfo,
    products: GroupedProducts,
) -> Tensor:
    """Return the output of each row's expert times the row's routing probability: [r, h] -> [r, h].

    Args:
        fc1: [E/ep, f/etp, h], or [E/ep, 2 f/etp, h] with a gated activation.
        fc2: [E/ep, h, f/etp]; one rank of etp has its bias, since the outputs of these ranks are summed.
    """
    rows, ends, probs = dispatched.rows, dispatched.ends, dispatched.probs
    out: Tensor = _GroupedMlp.apply(rows, probs, ends, fc1, fc2, activation, info, products)
    return out


class _GroupedMlp(Function):
    """Saves the rows and the output of fc1; recomputes the activation. Weight gradients bypass autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        probs: Tensor,
        ends: Tensor,
        fc1: GroupedWeight,
        fc2: GroupedWeight,
        activation: Activation,
        info: PassInfo,
        products: GroupedProducts,
    ) -> Tensor:
        inner = products.fc1(rows, fc1.value, ends, info)
        if fc1.bias is not None:
            add_grouped_bias(inner, fc1.bias.value, ends)
        ctx.save_for_backward(rows, probs, ends, inner, fc1.value, fc2.value)
        ctx.grads, ctx.biases = (fc1.grad, fc2.grad), (fc1.bias, fc2.bias)
        ctx.activation, ctx.info, ctx.products = activation, info, products
        out = products.fc2(activate_weighted(inner, probs, activation), fc2.value, ends, info)
        return out if fc2.bias is None else add_grouped_bias(out, fc2.bias.value, ends, probs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, probs, ends, inner, fc1, fc2 = ctx.saved_tensors
        dy = grads[0].contiguous()
        dweighted = ctx.products.fc2_backward(dy, fc2, ends)
        dinner, dprobs = activate_weighted_backward(dweighted, inner, probs, ctx.activation)
        weighted = dweighted  # overwritten with the recomputed input of fc2
        drows = ctx.products.fc1_backward(dinner, fc1, ends)
        fc1_grad, fc2_grad = ctx.grads
        fc1_bias, fc2_bias = ctx.biases
        if fc2_bias is not None:
            dprobs += grouped_bias_weight_gradient(dy, fc2_bias.value, ends).to(dprobs.dtype)

        def compute() -> None:
            accumulate_grouped_weight_gradient(fc2_grad, dy, weighted, ends)
            accumulate_grouped_weight_gradient(fc1_grad, dinner, rows, ends)
            if fc2_bias is not None:
                accumulate_grouped_bias_gradient(fc2_bias.grad, dy, ends, probs)
            if fc1_bias is not None:
                accumulate_grouped_bias_gradient(fc1_bias.grad, dinner, ends)

        ctx.info.compute_weight_gradient(compute)
        return drows, dprobs, *[None] * 6
