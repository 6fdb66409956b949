"""The runs of a shard as arguments of a kernel: at most four, so that no table needs to travel to the GPU.

run 0 | run 1 | run 2 | run 3        borders 1 to 3, and numbers for each run, of which each element picks its own
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatrain.kernels.fused.launching import jit, tl
from megatrain.kernels.optimizer.shard_update import HyperparamRange

_MOST_RUNS = 4
"""A segment is an embedding, a layer or the head, with matrices, vectors that decay and vectors that do not."""


def borders_and_numbers(runs: Sequence[HyperparamRange], numbers: Sequence[tuple[float, ...]]) -> tuple[Any, ...]:
    """Where runs 1 to 3 begin, the first number of all four, the second of all, and so on; missing runs begin at the end."""
    assert 1 <= len(runs) <= _MOST_RUNS, f"{len(runs)} runs in a shard"
    missing = _MOST_RUNS - len(runs)
    borders = [run.start for run in runs[1:]] + [runs[-1].stop] * missing
    filled = [*numbers, *[numbers[-1]] * missing]
    return (*borders, *(number for of_all in zip(*filled, strict=True) for number in of_all))


@jit
def pick(at, border1, border2, border3, n0, n1, n2, n3):
    """Each place's number: that of the run it is in."""
    return tl.where(at < border2, tl.where(at < border1, n0, n1), tl.where(at < border3, n2, n3))
