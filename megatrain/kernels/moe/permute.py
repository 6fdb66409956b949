"""Permutation of token rows into expert order, and back with a sum per token.

    token 0: experts 2, 0      sort_by_expert       expert 0: tokens 0 1      ends 2 3 4
    token 1: experts 0, 1     ---------------->     expert 1: token 1
                                                    expert 2: token 0

A token-expert assignment is a (token, expert) pair; the assignments of an expert keep the order of the tokens. Both
directions only gather by index, and each is the gradient of the other: results are deterministic and the host does not
wait for counts. On GPUs fused kernels sort and move the rows. The references here run in any dtype on any device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fused import permute as fused
from megatrain.kernels.fused.launching import is_fused


class Permutation(NamedTuple):
    """The rows of token-expert assignments, sorted by expert."""

    rows: Tensor
    """Row of each assignment, int64 [t, k]; -1 for an assignment without a row."""
    assignments: Tensor
    """Assignment of each row, int64 [r], numbered token by token; -1 for an empty row."""
    ends: Tensor
    """End of each expert's rows, int32 [e]. Rows after the last end are unused."""
    load: Tensor
    """Number of the assignments, int32 []; if there are fewer rows, the last ones have none."""

    @property
    def tokens(self) -> Tensor:
        """Token of each row, int64 [r]; -1 for an empty row."""
        return torch.div(self.assignments, self.rows.shape[1], rounding_mode="floor")


def sort_by_expert(
    experts: Tensor,
    *,
    num_experts: int,
    num_rows: int,
    first_expert: int = 0,
    kept: Tensor | None = None,
    rows_per_expert: int | None = None,
    token_rows: Tensor | None = None,
) -> Permutation:
    """Sort the assignments to `num_experts` experts from `first_expert` on; other assignments get no row.

    On a GPU a kernel counts them; more than `MAX_EXPERTS` experts are sorted, as on a CPU.

    Args:
        experts: integers [t, k].
        num_rows: rows to allocate; ignored with `rows_per_expert`. Assignments beyond them have no row: see `Permutation.load`.
        kept: bool [t, k], False for assignments that get no row; None: all are kept.
        rows_per_expert: rows of each expert, at least its assignments; the rest is empty. None: as many as assignments.
        token_rows: int64 [t], rows of other tensors in which the tokens are, -1: none; the permutation is that of these
            rows, at most t. A token with an assignment has a row.
    """
    num_rows = num_rows if rows_per_expert is None else num_experts * rows_per_expert
    if is_fused(experts) and num_experts <= fused.MAX_EXPERTS:
        columns = fused.Columns(fused.EXPERT, num_experts, first_expert)
        return Permutation(
            *fused.sort_items(
                experts,
                columns,
                num_rows=num_rows,
                kept=kept,
                rows_per_column=rows_per_expert,
                token_rows=token_rows,
            )
        )
    found = sort_by_expert_reference(experts, num_experts, num_rows, first_expert, kept, rows_per_expert)
    return found if token_rows is None else _of_token_rows(found, token_rows)


def _of_token_rows(permutation: Permutation, token_rows: Tensor) -> Permutation:
    """Return the permutation of tokens for the rows in which they are."""
    rows, assignments = permutation.rows, permutation.assignments
    num_tokens, top_k = rows.shape
    at = token_rows.where(token_rows >= 0, num_tokens)  # one more row, for tokens without one
    of_rows = rows.new_full((num_tokens + 1, top_k), -1).index_copy_(0, at, rows)[:num_tokens]
    of_assignments = token_rows[permutation.tokens] * top_k + assignments % top_k
    return permutation._replace(rows=of_rows, assignments=of_assignments.masked_fill(assignments < 0, -1))


def sort_by_rank(
    experts: Tensor,
    *,
    num_ranks: int,
    experts_per_rank: int,
    first_expert: int = 0,
    token_rows: Tensor | None = None,
) -> Permutation:
    """Sort tokens by the ranks of their experts; a token has one row for each rank with at least one of them.

    Args:
        experts: integers [t, k]; -1: none. The ranks have those from `first_expert` on.
        token_rows: see `sort_by_expert`.
    Returns:
        A permutation of (token, rank) pairs, its rows [t, ranks]; min(k, ranks) rows per token are allocated.
    """
    num_tokens, top_k = experts.shape
    num_rows = num_tokens * min(top_k, num_ranks)
    if is_fused(experts) and num_ranks <= fused.MAX_EXPERTS:
        columns = fused.Columns(fused.RANK, num_ranks, first_expert, experts_per_rank)
        return Permutation(*fused.sort_items(experts, columns, num_rows=num_rows, token_rows=token_rows))
    ranks = torch.arange(num_ranks, device=experts.device)
    rank_of = (experts - first_expert).div(experts_per_rank, rounding_mode="floor")
    is_sent = (rank_of[..., None] == ranks).any(1)
    found = sort_by_expert_reference(ranks.expand_as(is_sent), num_ranks, num_rows, 0, is_sent, None)
    return found if token_rows is None else _of_token_rows(found, token_rows)


def sort_by_source(
    experts: Tensor,
    num_sources: int,
    *,
    first_expert: int,
    num_experts: int,
    rows_per_source: int | None = None,
) -> Permutation:
    """Sort the tokens that have some of `num_experts` experts from `first_expert` on, by the sources from which they come.

    Args:
        experts: integers [sources * t, k], of t tokens of each source; -1: none.
        rows_per_source: rows of each source, the last ones unused. None: no rows are unused.
    Returns:
        A permutation with one assignment per token; its ends are those of the sources.
    """
    num_tokens = len(experts)
    num_rows = num_tokens if rows_per_source is None else num_sources * rows_per_source
    if is_fused(experts) and num_sources <= fused.MAX_EXPERTS:
        columns = fused.Columns(
            fused.SOURCE, num_sources, first_expert, num_experts, num_tokens // num_sources
        )
        return Permutation(
            *fused.sort_items(experts, columns, num_rows=num_rows, rows_per_column=rows_per_source)
        )
    source = torch.arange(num_tokens, device=experts.device) // (num_tokens // num_sources)
    has_own = ((experts >= first_expert) & (experts < first_expert + num_experts)).any(1)
    return sort_by_expert_reference(
        source[:, None], num_sources, num_rows, 0, has_own[:, None], rows_per_source
    )


def sort_by_expert_reference(
    experts: Tensor,
    num_experts: int,
    num_rows: int,
    first_expert: int,
    kept: Tensor | None,
    rows_per_expert: int | None,
) -> Permutation:
    """Sort with torch's stable sort; `num_rows` counts all rows."""
    local = experts.flatten().long() - first_expert
    has_no_row = (local < 0) | (local >= num_experts)
    if kept is not None:
        has_no_row |= ~kept.flatten()
    sorted_experts, assignments = local.masked_fill(has_no_row, num_experts).sort(stable=True)
    starts = torch.searchsorted(sorted_experts, torch.arange(num_experts + 1, device=experts.device))
    rows = torch.arange(sorted_experts.numel(), device=experts.device)
    ends = starts[1:].clamp(max=num_rows)
    if rows_per_expert is not None:
        padded_starts = torch.arange(0, num_rows + 1, rows_per_expert, device=experts.device)
        rows += (padded_starts - starts)[sorted_experts]
        ends = padded_starts[1:]
    has_no_row = (sorted_experts == num_experts) | (rows >= num_rows)
    at_row = assignments.new_full((num_rows + 1,), -1)  # one more row, for assignments without a row
    at_row.scatter_(0, rows.masked_fill(has_no_row, num_rows), assignments)
    row_of = torch.empty_like(assignments).scatter_(0, assignments, rows.masked_fill(has_no_row, -1))
    load = starts[-1].to(torch.int32)
    return Permutation(row_of.view_as(experts), at_row[:num_rows], ends.to(torch.int32), load)


def permute_rows(x: Tensor, permutation: Permutation) -> Tensor:
    """Gather the token of each row, zeros for empty rows: [t, h] -> [r, h]. Rows after the last end have undefined values."""
    if is_fused(x):
        return fused.gather_rows(x, permutation.assignments, permutation.rows.shape[1], permutation.ends)
    return gather_rows_reference(x, permutation.tokens)


def unpermute_rows(rows: Tensor, permutation: Permutation) -> Tensor:
    """Sum the rows of each token's assignments in the accumulation dtype: [r, h] -> [t, h]."""
    if is_fused(rows):
        return fused.gather_sum(rows, permutation.rows)
    total = torch.zeros(
        len(permutation.rows), rows.shape[1], dtype=accumulation_dtype(rows.dtype), device=rows.device
    )
    for column in permutation.rows.unbind(1):
        total += gather_rows_reference(rows, column)
    return total.to(rows.dtype)


def permute_values(values: Tensor, permutation: Permutation) -> Tensor:
    """Gather the value of each row's assignment, 0 for empty rows: [t, k] -> [r]."""
    return _gather_values(values.flatten(), permutation.assignments)


def unpermute_values(values: Tensor, permutation: Permutation) -> Tensor:
    """Gather the value of each assignment's row, 0 for assignments without a row: [r] -> [t, k]."""
    return _gather_values(values, permutation.rows)


def gather_rows_reference(x: Tensor, index: Tensor) -> Tensor:
    """Gather rows of x, zeros for index -1 (also if x has NaN): [n, h] and int64 [r] -> [r, h]."""
    return x.index_select(0, index.clamp(min=0)).masked_fill_((index < 0)[:, None], 0)


def _gather_values(x: Tensor, index: Tensor) -> Tensor:
    if is_fused(x):
        return fused.gather_values(x, index)
    return gather_rows_reference(x[:, None], index.flatten()).view(index.shape)
