"""Simulates a schedule of packs: the time of the step and the share of it that ranks are idle, and a drawing.

rank 0  AAAAAAAABBBBBBBBBCCCCCC      a letter a pack, as wide as its time
rank 1  AAAAAAAABBBBBBBBBDDDD..      . idle

Where ranks communicate within each pass, all passes of one number begin together and end with the longest, an empty one included.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from megatrain.parallel.packs.schedule import Integers, Pack, PackCosts, PackDomain

_LETTERS: Final = string.ascii_uppercase + string.ascii_lowercase


@dataclass(frozen=True)
class SimulatedStep:
    """The times of a step, in the unit of the costs."""

    starts: tuple[float, ...]
    """Start of each pack."""
    ends: tuple[float, ...]
    time: float
    idle_share: float
    """Share of the ranks' time in which they wait."""


def simulate(packs: Sequence[Pack], lengths: Integers, costs: PackCosts, domain: PackDomain) -> SimulatedStep:
    """Run packs in their order: each starts when all ranks of its group, and those that these wait for, are ready."""
    ready, starts, ends = np.zeros(domain.num_ranks), np.zeros(len(packs)), np.zeros(len(packs))
    for passes in _passes(packs, domain):
        rows = max(domain.num_rows(packs[one].num_tokens, packs[one].size) for one in passes)
        rows = rows if domain.filler_length else 0
        for first, last in _in_step([packs[one] for one in passes], domain):
            inside = [one for one in passes if first <= packs[one].first < last]
            start, empty = float(ready[first:last].max()), Pack(first, 1, (), 0)
            own = [seconds_of(packs[one], lengths, costs, domain, rows) for one in inside]
            starts[inside], ends[inside] = start, start + np.array(own)
            waits = sum(packs[one].size for one in inside) < last - first
            longest = max([*own, seconds_of(empty, lengths, costs, domain, rows)] if waits else own)
            ready[first:last] = start + longest
    time = float(ready.max())
    busy = float(((ends - starts) * [pack.size for pack in packs]).sum())
    idle = 1 - busy / (time * domain.num_ranks) if time else 0.0
    return SimulatedStep(tuple(starts.tolist()), tuple(ends.tolist()), time, idle)


def _passes(packs: Sequence[Pack], domain: PackDomain) -> list[list[int]]:
    """Return the indices of the packs that are the first pass of their ranks, the second, and so on."""
    counts, found = [0] * domain.num_ranks, list[list[int]]()
    for number, pack in enumerate(packs):
        place = counts[pack.first]
        found += [[] for _ in range(place + 1 - len(found))]
        found[place].append(number)
        counts[pack.first : pack.first + pack.size] = [place + 1] * pack.size
    return found


def _in_step(packs: Sequence[Pack], domain: PackDomain) -> Iterator[tuple[int, int]]:
    """Yield the first rank of each run of ranks that wait for each other in a pass, and the one after its last."""
    runs = [(pack.first, pack.first + pack.size) for pack in packs]
    if domain.num_in_step > 1:
        runs += [
            (first, first + domain.num_in_step) for first in range(0, domain.num_ranks, domain.num_in_step)
        ]
    found: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if found and first < found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    yield from found


def seconds_of(
    pack: Pack, lengths: Integers, costs: PackCosts, domain: PackDomain, num_rows: int = 0
) -> float:
    """Return the time of a pack, with the rows that fill it up to `num_rows` on each rank at least."""
    squares = float((lengths[list(pack.documents)].astype(np.float64) ** 2).sum())
    rows = max(domain.num_rows(pack.num_tokens, pack.size), num_rows) * pack.size
    if domain.filler_length:
        count, rest = divmod(rows - pack.num_tokens, domain.filler_length)
        squares += count * domain.filler_length**2 + rest**2
    return float(costs.seconds(np.array(float(rows)), np.array(squares), pack.size)) + costs.each


def drawing(packs: Sequence[Pack], step: SimulatedStep, domain: PackDomain, width: int = 72) -> Iterator[str]:
    """Yield a line for each rank."""
    label = len(f"rank {domain.num_ranks - 1}")
    for rank in range(domain.num_ranks):
        cells = ["."] * width
        for number, pack in enumerate(packs):
            if rank in pack.ranks:
                first, last = (round(t / step.time * width) for t in (step.starts[number], step.ends[number]))
                cells[first:last] = _LETTERS[number % len(_LETTERS)] * (last - first)
        yield f"{f'rank {rank}':<{label}}  {''.join(cells)}"
