"""Slow ranks (--log-straggler): the time of each rank's forward and backward passes, without the wait for gradients of other replicas.

> stragglers: forward and backward 101.2 ms to 149.8 ms, median 101.9 | slowest rank 5 on n1: 149.8 ms | fastest rank 2 on n0: 101.2 ms
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

import torch

from megatrain.training.step_report import DeviceTime


class ComputeTimes:
    """Times of the forward and backward passes of steps, oldest first; a context manager around each."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: deque[tuple[DeviceTime, DeviceTime]] = deque()
        self._start = DeviceTime(device)

    def __enter__(self) -> None:
        self._start = DeviceTime(self._device)

    def __exit__(self, *_: object) -> None:
        self._spans.append((self._start, DeviceTime(self._device)))

    def forget_last(self) -> None:
        """Forget the newest step, which is computed again."""
        self._spans.pop()

    def take(self) -> float:
        """Return the seconds of the oldest step; its report must be read before."""
        start, end = self._spans.popleft()
        return end.seconds_since(start)


def straggler_line(times: Sequence[tuple[str, float]], *, flops: float, count: int) -> str:
    """Return the line of an interval.

    Args:
        times: host, and mean milliseconds of forward and backward, of each rank.
        flops: of a rank's iteration, for the throughput; 0: it is not shown.
        count: how many of the slowest and of the fastest ranks are shown.
    """
    ranks = sorted(range(len(times)), key=lambda rank: -times[rank][1])
    milliseconds = [time for _, time in times]
    shown = [
        f"{kind} " + ", ".join(_shown(rank, *times[rank], flops) for rank in chosen)
        for kind, chosen in (("slowest", ranks[:count]), ("fastest", ranks[::-1][:count]))
    ]
    spread = f"{min(milliseconds):.1f} ms to {max(milliseconds):.1f} ms, median {statistics.median(milliseconds):.1f}"
    return f"> stragglers: forward and backward {spread} | {' | '.join(shown)}"


def _shown(rank: int, host: str, milliseconds: float, flops: float) -> str:
    speed = f", {flops / milliseconds / 1e9:.1f} TFLOP/s" if flops else ""
    return f"rank {rank} on {host}: {milliseconds:.1f} ms{speed}"
