"""Schedules of packs: the documents of a global batch -> packs, each on a group of the ranks of dp and cp.

    ranks   0 1 2 3
            A A A A      one document of 60,000 tokens on 4 ranks
            B B C D      30,000 on 2, packs of short ones on 1
              E   F G    ...

Groups are aligned runs of ranks, and larger groups come first: all ranks of a group have run the same packs before it. So no
two groups wait for one another, a rank is idle at the end only, and the k-th pass of a rank is the k-th of its whole group.

A schedule is a function of the lengths: all ranks compute the same one.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_PATIENCE: Final = (1.0, 0.5, 0.25, 0.125, 0.0)
"""Largest shares of a step that one document may take, tried in turn: less makes groups larger, packs fewer and ranks equal."""


@dataclass(frozen=True, kw_only=True)
class PackCosts:
    """Time of a pack on a group of n ranks, in any unit: each + (token * t + pair * sum of squared lengths) / n.

    The defaults compare packs by their tokens.
    """

    token: float = 1.0
    pair: float = 0.0
    """Time of a pair of tokens of a document."""
    sent: float = 0.0
    """Added to `token` in groups of several ranks, which exchange the rows of attention."""
    each: float = 0.0
    """Time of any pack: launches of kernels, waiting for ranks."""

    def seconds(self, tokens: Floats, squares: Floats, size: int) -> Floats:
        """Return the time of documents on a group without that of their pack; arrays of any shape."""
        seconds: Floats = ((self.token + self.sent * (size > 1)) * tokens + self.pair * squares) / size
        return seconds


@dataclass(frozen=True, kw_only=True)
class PackDomain:
    """The ranks that share the documents of a global batch, and the groups that they form."""

    num_ranks: int
    sizes: tuple[int, ...]
    """Sizes of the groups, ascending; each divides the next, and the last one divides `num_ranks`."""
    tokens_per_rank: int
    """Most rows of a pack on a rank, a multiple of `multiple`."""
    multiple: int = 1
    """Rows of a pack on a rank are a multiple of this."""
    num_in_step: int = 1
    """Ranks, in aligned runs, that communicate within each pass (of experts, or of sharded weights): they wait for each other."""
    filler_length: int = 0
    """Tokens of the documents that fill passes of one number up to equally many rows on all ranks; 0: rows differ."""

    def capacity(self, size: int) -> int:
        """Return the most tokens of a pack on a group."""
        return size * self.tokens_per_rank

    def num_rows(self, tokens: int, size: int) -> int:
        """Return the rows of a pack of so many tokens on each rank of its group."""
        return max(1, -(-tokens // (size * self.multiple))) * self.multiple


@dataclass(frozen=True)
class Pack:
    """Documents that are one micro-batch of a group."""

    first: int
    """First rank of the group, a multiple of `size`."""
    size: int
    documents: tuple[int, ...]
    """Their indices in the global batch."""
    num_tokens: int

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.size)


Scheduler = Callable[[Integers, PackCosts, PackDomain], list[Pack]]
"""Lengths of the documents, at most the capacity of the largest group -> packs in the order in which ranks run them."""


def balanced_packs(lengths: Integers, costs: PackCosts, domain: PackDomain) -> list[Pack]:
    """Balance the times of all ranks: each document is on the smallest group on which it does not take too much of the step.

    From the largest groups to the smallest, each document in turn, longest first, goes to the group with the least time so far
    (Graham's LPT rule, doi:10.1137/0117039). Documents of a group are then packed.
    """
    tokens = lengths.astype(np.float64)
    squares, order = tokens**2, np.argsort(-lengths, kind="stable")
    needed = _smallest_sizes(lengths, domain)
    share = lower_bound(lengths, costs, domain)
    best: tuple[float, list[tuple[int, Integers, Integers]]] | None = None
    for sizes in _distinct(
        _sizes(tokens, squares, needed, costs, domain, share * part) for part in _PATIENCE
    ):
        found = _assigned(tokens, squares, order, sizes, costs, domain)
        if best is None or found[0] < best[0]:
            best = found
    assert best is not None
    return [pack for level in best[1] for pack in _packs_of_level(*level, lengths, domain)]


def first_fit_packs(lengths: Integers, costs: PackCosts, domain: PackDomain) -> list[Pack]:  # noqa: ARG001 (a Scheduler)
    """Pack documents in their order, each into the first pack with space, and deal packs to the groups in turn."""
    size = domain.sizes[-1]
    packs: list[list[int]] = []
    free = _FreeTokens(domain.capacity(size))
    for document, length in enumerate(lengths.tolist()):
        number = free.first_with(length)
        if number == len(packs):
            packs.append([])
        packs[number].append(document)
    num_groups = domain.num_ranks // size
    return [
        Pack(number % num_groups * size, size, tuple(pack), int(lengths[pack].sum()))
        for number, pack in enumerate(packs)
    ]


SCHEDULERS: Final[Mapping[str, Scheduler]] = {
    "default_dynamic_cp": balanced_packs,
    "dp_balanced": balanced_packs,
    "first_fit": first_fit_packs,
}
"""By value of --sequence-packing-scheduler; all but the first get a domain with one size of groups."""


def lower_bound(lengths: Integers, costs: PackCosts, domain: PackDomain) -> float:
    """Return a time that no schedule is below: all work in equal parts, or the longest document on the best group for it."""
    if not len(lengths):
        return 0.0
    tokens = lengths.astype(np.float64)
    needed = _smallest_sizes(lengths, domain)
    times = [costs.seconds(tokens, tokens**2, size) for size in domain.sizes]
    is_allowed = [needed <= size for size in domain.sizes]
    work = np.min(
        [np.where(a, t * s, np.inf) for a, t, s in zip(is_allowed, times, domain.sizes, strict=True)], 0
    )
    alone = np.min([np.where(a, t, np.inf) for a, t in zip(is_allowed, times, strict=True)], 0)
    return max(float(work.sum()) / domain.num_ranks, float(alone.max())) + costs.each


def _smallest_sizes(lengths: Integers, domain: PackDomain) -> Integers:
    """Return the smallest group that has space for each document."""
    capacities = np.array([domain.capacity(size) for size in domain.sizes])
    numbers = np.searchsorted(capacities, lengths)
    assert not len(lengths) or numbers.max() < len(capacities), "a document is longer than the largest pack"
    return np.array(domain.sizes, np.int64)[numbers]


def _sizes(
    tokens: Floats, squares: Floats, needed: Integers, costs: PackCosts, domain: PackDomain, limit: float
) -> Integers:
    """Return the smallest group on which each document fits and takes at most `limit`, or the largest group."""
    found = np.full(len(tokens), domain.sizes[-1], np.int64)
    for size in reversed(domain.sizes[:-1]):
        found[(needed <= size) & (costs.seconds(tokens, squares, size) <= limit)] = size
    return found


def _distinct(choices: Iterable[Integers]) -> list[Integers]:
    found: list[Integers] = []
    for one in choices:
        if not any(np.array_equal(one, other) for other in found):
            found.append(one)
    return found


def _assigned(
    tokens: Floats, squares: Floats, order: Integers, sizes: Integers, costs: PackCosts, domain: PackDomain
) -> tuple[float, list[tuple[int, Integers, Integers]]]:
    """Return the time of the slowest rank, and for each size of groups its documents and the group of each."""
    loads = np.zeros(domain.num_ranks)
    levels = []
    for size in reversed(domain.sizes):
        documents = order[sizes[order] == size]
        seconds = costs.seconds(tokens[documents], squares[documents], size)
        heap = [(load, group) for group, load in enumerate(loads[::size].tolist())]
        heapq.heapify(heap)
        groups = []
        for one in seconds.tolist():
            load, group = heap[0]
            heapq.heapreplace(heap, (load + one, group))
            groups.append(group)
        numbers, loads_of_groups = (
            np.array(groups, np.int64),
            np.array(sorted((g, load) for load, g in heap))[:, 1],
        )
        sums = np.bincount(numbers, tokens[documents], domain.num_ranks // size)
        loads_of_groups += costs.each * np.ceil(sums / domain.capacity(size))
        loads = loads_of_groups.repeat(size)
        levels.append((size, documents, numbers))
    return float(loads.max()), levels


def _packs_of_level(
    size: int, documents: Integers, groups: Integers, lengths: Integers, domain: PackDomain
) -> list[Pack]:
    """Pack the documents of each group, longest first, each into the pack that it fills best."""
    packs: list[Pack] = []
    by_group = documents[np.argsort(groups, kind="stable")]
    ends = np.cumsum(np.bincount(groups, minlength=domain.num_ranks // size))
    for group, own in enumerate(np.split(by_group, ends[:-1])):
        found = _best_fit(own.tolist(), lengths[own].tolist(), domain.capacity(size))
        packs += [Pack(group * size, size, tuple(one), int(lengths[one].sum())) for one in found]
    return packs


def _best_fit(documents: list[int], lengths: list[int], capacity: int) -> list[list[int]]:
    """Pack documents, given longest first."""
    packs: list[list[int]] = []
    free: list[tuple[int, int]] = []
    """Space and number of each pack, ascending."""
    for document, length in zip(documents, lengths, strict=True):
        place = bisect.bisect_left(free, (length, -1))
        if place == len(free):
            packs.append([])
            space, number = capacity, len(packs) - 1
        else:
            space, number = free.pop(place)
        packs[number].append(document)
        bisect.insort(free, (space - length, number))
    return packs


class _FreeTokens:
    """The space that is left in packs, in a tree of maxima: finding the first pack with space takes O(log packs)."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.num_packs = capacity, 0
        self.tree = [0, 0]

    def first_with(self, length: int) -> int:
        """Take `length` from the first pack that has it, or from a new one; return its number."""
        if self.tree[1] < length:
            self._open()
        node, leaves = 1, len(self.tree) // 2
        while node < leaves:
            node = 2 * node if self.tree[2 * node] >= length else 2 * node + 1
        number = node - leaves
        self._set(number, self.tree[node] - length)
        return number

    def _open(self) -> None:
        leaves = len(self.tree) // 2
        if self.num_packs == leaves:
            free = [*self.tree[leaves:], *[0] * leaves]
            self.tree = [0] * (2 * len(free))
            for number, space in enumerate(free):
                self._set(number, space)
        self._set(self.num_packs, self.capacity)
        self.num_packs += 1

    def _set(self, number: int, space: int) -> None:
        node = number + len(self.tree) // 2
        self.tree[node] = space
        while node > 1:
            node //= 2
            self.tree[node] = max(self.tree[2 * node], self.tree[2 * node + 1])
