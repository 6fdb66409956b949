"""The hyperparameter ranges of a shard as kernel arguments: at most four, so that no table is copied to the GPU.

range 0 | range 1 | range 2 | range 3        start of ranges 1 to 3, and values per range, selected for each element
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatrain.kernels.fused.launching import jit, tl
from megatrain.kernels.optimizer.shard_update import HyperparamRange

_MAX_RANGES = 4
"""A segment is an embedding, a layer or the head, with matrices, vectors that decay and vectors that do not."""


def range_arguments(
    ranges: Sequence[HyperparamRange], values: Sequence[tuple[float, ...]]
) -> tuple[Any, ...]:
    """Return the starts of ranges 1 to 3, then the first value of all four, the second of all four, and so on.

    Missing ranges start at the end of the shard.
    """
    assert 1 <= len(ranges) <= _MAX_RANGES, f"{len(ranges)} ranges in a shard"
    missing = _MAX_RANGES - len(ranges)
    starts = [one.start for one in ranges[1:]] + [ranges[-1].stop] * missing
    padded = [*values, *[values[-1]] * missing]
    return (*starts, *(value for of_all in zip(*padded, strict=True) for value in of_all))


@jit
def select_by_range(at, start1, start2, start3, n0, n1, n2, n3):
    """Return the value of each element's range."""
    return tl.where(at < start2, tl.where(at < start1, n0, n1), tl.where(at < start3, n2, n3))
