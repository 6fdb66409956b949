"""Rows of tokens put in the order of the experts that they visit, and summed back to tokens.

    token 0 visits experts 2, 0      sort_by_expert      expert 0: tokens 0 1      ends 2 3 4
    token 1 visits experts 0, 1     ----------------->    expert 1: token 1
                                                          expert 2: token 0

A visit is a pair of token and expert; visits of an expert keep the order of the tokens. Both ways only read by index:
the gradient of one is the other, nothing is added in an order that changes from run to run, and no host waits for
counts. On GPUs fused kernels order and move the rows; the references here do it in any dtype on any device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fused import permute as fused
from megatrain.kernels.fused.launching import is_fused


class Permutation(NamedTuple):
    """Which visit is at which row."""

    places: Tensor
    """Row of each visit, int64 [t, k]; -1 where a visit has none."""
    visits: Tensor
    """Visit at each row, int64 [r], counted token by token; -1 where there is none."""
    ends: Tensor
    """Where each expert's rows end, int32 [e]. Rows from the last one on are nobody's."""

    @property
    def num_tokens(self) -> int:
        return self.places.shape[0]

    @property
    def tokens(self) -> Tensor:
        """Token at each row, int64 [r]; -1 where there is none."""
        return torch.div(self.visits, self.places.shape[1], rounding_mode="floor")


def sort_by_expert(
    experts: Tensor,
    *,
    num_experts: int,
    num_rows: int,
    first: int = 0,
    kept: Tensor | None = None,
    rows_per_expert: int | None = None,
) -> Permutation:
    """Permutation the visits to the experts `first` to `first + num_experts`; other visits get no row.

    On a GPU a kernel counts them; of more than `MOST_EXPERTS` experts they are sorted, as on a CPU.

    Args:
        experts: int64 [t, k].
        num_rows: no fewer than there are visits; not asked for with `rows_per_expert`, of which each expert has as many.
        kept: bool [t, k], False where a visit gets no row; None: all are kept.
        rows_per_expert: rows of each expert, no fewer than its visits: those left over hold nothing. None: as many as visits.
    """
    num_rows = num_rows if rows_per_expert is None else num_experts * rows_per_expert
    if is_fused(experts) and num_experts <= fused.MOST_EXPERTS:
        return Permutation(
            *fused.sort_by_expert(
                experts,
                kept,
                num_experts=num_experts,
                num_rows=num_rows,
                first=first,
                rows_per_expert=rows_per_expert,
            )
        )
    return order_by_expert_reference(experts, num_experts, num_rows, first, kept, rows_per_expert)


def order_by_expert_reference(
    experts: Tensor,
    num_experts: int,
    num_rows: int,
    first: int,
    kept: Tensor | None,
    rows_per_expert: int | None,
) -> Permutation:
    """The same by a stable sort; `num_rows` are all of them."""
    own = experts.flatten() - first
    gets_none = (own < 0) | (own >= num_experts)
    if kept is not None:
        gets_none |= ~kept.flatten()
    numbers, visits = own.masked_fill(gets_none, num_experts).sort(stable=True)
    starts = torch.searchsorted(numbers, torch.arange(num_experts + 1, device=numbers.device))
    rows = torch.arange(numbers.numel(), device=numbers.device)
    ends = starts[1:]
    if rows_per_expert is not None:
        firsts = torch.arange(0, num_rows + 1, rows_per_expert, device=numbers.device)
        rows += (firsts - starts)[numbers]
        ends = firsts[1:]
    gets_none = numbers == num_experts
    at_row = visits.new_full((num_rows + 1,), -1)  # a row too many, for visits that get none
    at_row.scatter_(0, rows.masked_fill(gets_none, num_rows), visits)
    places = torch.empty_like(visits).scatter_(0, visits, rows.masked_fill(gets_none, -1))
    return Permutation(places.view_as(experts), at_row[:num_rows], ends.to(torch.int32))


def permute_rows(x: Tensor, order: Permutation) -> Tensor:
    """The token of each visit at its row; zeros where there is none: [t, h] -> [r, h]."""
    if is_fused(x):
        return fused.rows_at(x, order.visits, order.places.shape[1])
    return gather_rows_reference(x, order.tokens)


def unpermute_rows(rows: Tensor, order: Permutation) -> Tensor:
    """For each token the sum of its visits' rows, formed in a wide dtype: [r, h] -> [t, h]."""
    at = fused.sums_at if is_fused(rows) else gather_sum_reference
    return at(rows, order.places)


def permute_values(numbers: Tensor, order: Permutation) -> Tensor:
    """The number of each visit at its row, 0 where there is none: [t, k] -> [r]."""
    return _numbers_at(numbers.flatten(), order.visits)


def unpermute_values(numbers: Tensor, order: Permutation) -> Tensor:
    """The number at each visit's row, 0 for a visit without one: [r] -> [t, k]."""
    return _numbers_at(numbers, order.places)


def gather_rows_reference(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x by number, and zeros for -1, whatever x holds: [n, h] and int64 [r] -> [r, h]."""
    return x.index_select(0, index.clamp(min=0)).masked_fill_((index < 0)[:, None], 0)


def gather_sum_reference(x: Tensor, index: Tensor) -> Tensor:
    """Sums of rows of x by number, one after the other, without those of number -1: [n, h] and int64 [r, k] -> [r, h]."""
    total = torch.zeros(len(index), x.shape[1], dtype=accumulation_dtype(x.dtype), device=x.device)
    for places in index.unbind(1):
        total += gather_rows_reference(x, places)
    return total.to(x.dtype)


def _numbers_at(x: Tensor, index: Tensor) -> Tensor:
    if is_fused(x):
        return fused.numbers_at(x, index)
    return gather_rows_reference(x[:, None], index.flatten()).view(index.shape)
