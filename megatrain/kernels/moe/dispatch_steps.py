"""The tokens that every all-to-all of a dispatch sends and receives.

    one step      own tokens ─> ranks of their experts
    two steps     own tokens ─> hosts of their experts, to the rank with the same index there ─> ranks of their experts

A step divides experts among its ranks. Every rank knows the experts of all tokens, and computes without communication what
it sends and receives in both steps. The host reads all counts at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatrain.kernels.moe.permute import Permutation, sort_by_rank, sort_by_source


class Ranks(Protocol):
    """Ranks, and the index of this one among them: a `parallel.grid.RankGroup`."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...


class SortedStep(NamedTuple):
    """The tokens of a step on this rank."""

    by_rank: Permutation
    """Sent tokens, by the rank to which they go; of a later step, the permutation of rows received in the step before."""
    by_source: Permutation
    """Received tokens, by the rank from which they come; in the last step those of all etp ranks, [etp, size]."""


class StepRows(NamedTuple):
    """The rows of a step, on the host."""

    by_rank: Permutation
    to_ranks: list[int]
    from_ranks: list[int]
    num_received: int
    """Rows to allocate: the most that an etp rank receives, at least 1. Rows that are not received are never read."""

    @property
    def returned(self) -> StepRows:
        """The way back."""
        return StepRows(self.by_rank, self.from_ranks, self.to_ranks, len(self.by_rank.assignments))


def sort_steps(experts: Tensor, num_experts: int, steps: Sequence[Ranks], etp: Ranks) -> list[SortedStep]:
    """Sort the tokens that this rank sends and receives in each step.

    Args:
        experts: of all tokens, integers [etp * ep * t, k], -1: none; the ranks of the first step vary fastest.
    """
    own, count = 0, 1
    for group in reversed((*steps, etp)):
        own, count = own * group.size + group.rank, count * group.size
    of_ranks = experts.view(count, -1, experts.shape[1])

    def tokens_of(num_ranks: int) -> Tensor:
        """Return the tokens of as many consecutive ranks, among which is this rank."""
        first = own // num_ranks * num_ranks
        return of_ranks[first : first + num_ranks].flatten(0, 1)

    found: list[SortedStep] = []
    num_ranks, first_expert = 1, 0
    for group in steps:
        num_experts //= group.size
        by_rank = sort_by_rank(
            tokens_of(num_ranks),
            num_ranks=group.size,
            experts_per_rank=num_experts,
            first_expert=first_expert,
            token_rows=found[-1].by_source.rows.flatten() if found else None,
        )
        first_expert += group.rank * num_experts
        num_sources = group.size * (etp.size if group is steps[-1] else 1)
        num_ranks *= num_sources
        by_source = sort_by_source(
            tokens_of(num_ranks), num_sources, first_expert=first_expert, num_experts=num_experts
        )
        found.append(SortedStep(by_rank, by_source))
    return found


def ends_of(steps: Sequence[SortedStep], by_expert: Permutation) -> Tensor:
    """Return the ends of each step's tokens by rank and by source, then the number of assignments to own experts."""
    ends = [ends for step in steps for ends in (step.by_rank.ends, step.by_source.ends)]
    return torch.cat((*ends, by_expert.ends[-1:]))


def even_ends(steps: Sequence[SortedStep], experts: Tensor, num_experts: int, etp: Ranks) -> list[int]:
    """Return `ends_of` for the same load of all experts; `experts` are those of own tokens, [t, k]."""
    (tokens, top_k), parts, ends = experts.shape, 1, []
    for step in steps:
        parts *= len(step.by_rank.ends)
        elsewhere = math.comb(num_experts - num_experts // parts, top_k) / math.comb(num_experts, top_k)
        sent = max(round(tokens * (1 - elsewhere)), 1)
        ends += [sent * (1 + number) for part in step for number in range(len(part.ends))]
        tokens *= len(step.by_rank.ends)
    return [*ends, experts.numel() * etp.size]


def rows_of(steps: Sequence[SortedStep], ends: list[int], etp: Ranks) -> list[StepRows]:
    """Return the rows of every step; `ends`: see `ends_of`."""
    found: list[StepRows] = []
    for by_rank, by_source in steps:
        size, end = len(by_rank.ends), len(by_rank.ends) + len(by_source.ends)
        to_ranks, from_ranks, ends = _differences(ends[:size]), _differences(ends[size:end]), ends[end:]
        by_etp = [from_ranks[first : first + size] for first in range(0, len(from_ranks), size)]
        if found:
            by_rank = by_rank._replace(
                rows=by_rank.rows[: found[-1].num_received],
                assignments=by_rank.assignments[: max(sum(to_ranks), 1)],
            )
        own = by_etp[etp.rank if len(by_etp) > 1 else 0]
        found.append(StepRows(by_rank, to_ranks, own, max(*map(sum, by_etp), 1)))
    return found


def _differences(ends: list[int]) -> list[int]:
    """Return the lengths of consecutive ranges from their ends."""
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
