"""Time work on a GPU with its events."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch

WARM_UP, REPEATS = 3, 10


def gpu() -> str:
    """Return the name of the GPU; end the script where torch finds none."""
    if not torch.cuda.is_available():
        sys.exit("error: this is timed on a GPU, and torch finds none\n  fix: check `nvidia-smi`")
    return torch.cuda.get_device_name()


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
