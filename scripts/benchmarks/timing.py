"""Time work on a GPU with its events."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

WARM_UP, REPEATS = 3, 10


def milliseconds(run: Callable[[], object]) -> float:
    """Return the median time of a run on the GPU."""
    for _ in range(WARM_UP):
        run()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
