"""Simulates a schedule of packs: the time of the step and the share of it that ranks are idle, and a drawing.

rank 0  AAAAAAAABBBBBBBBBCCCCCC      a letter a pack, as wide as its time
rank 1  AAAAAAAABBBBBBBBBDDDD..      . idle
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
    """Run packs in their order: each starts when all ranks of its group are ready."""
    ready, busy = np.zeros(domain.num_ranks), 0.0
    starts, ends = [], []
    for pack in packs:
        ranks = slice(pack.first, pack.first + pack.size)
        start = float(ready[ranks].max())
        end = start + seconds_of(pack, lengths, costs, domain)
        ready[ranks] = end
        busy += (end - start) * pack.size
        starts.append(start)
        ends.append(end)
    time = float(ready.max())
    idle = 1 - busy / (time * domain.num_ranks) if time else 0.0
    return SimulatedStep(tuple(starts), tuple(ends), time, idle)


def seconds_of(pack: Pack, lengths: Integers, costs: PackCosts, domain: PackDomain) -> float:
    """Return the time of a pack, with the rows that fill it up."""
    squares = np.array(float((lengths[list(pack.documents)].astype(np.float64) ** 2).sum()))
    rows = np.array(float(domain.num_rows(pack.num_tokens, pack.size) * pack.size))
    return float(costs.seconds(rows, squares, pack.size)) + costs.each


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
