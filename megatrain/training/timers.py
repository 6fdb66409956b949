"""Times of the parts of an iteration, for `--timing-log-level` and `--timing-log-option`.

    (min, max) time across ranks (ms):
        forward-backward ...............................: (183.21, 184.02)
        optimizer ......................................: (12.50, 12.61)

Names, levels and this text are Megatron-LM's, so that scripts can parse it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch.profiler import record_function

LEVELS = {
    "forward-backward": 1,
    "optimizer": 1,
    "batch-generator": 2,
    "optimizer-clip-main-grad": 2,
}
"""Lowest `--timing-log-level` that times each part. Level 2 adds synchronisations between the parts of level 1."""


class Timers:
    """Seconds of each part of an iteration on this rank.

    Attributes:
        span: context manager factory; work inside counts as the named part, in profiles too.
    """

    def __init__(self, level: int, device: torch.device) -> None:
        self.level = level
        self.span: Callable[[str], AbstractContextManager[object]] = self._time if level else record_function
        self._device = device
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def _time(self, name: str) -> Iterator[None]:
        """Add the time of the work inside to part `name`; the device is synchronised before and after."""
        if LEVELS[name] > self.level:
            with record_function(name):
                yield
            return
        start = self._now()
        with record_function(name):
            yield
        self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start

    def take(self) -> dict[str, float]:
        """Return the milliseconds of each part since the last call, and reset them."""
        taken = {name: 1000 * seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def across_ranks(times: Sequence[Mapping[str, float]], option: str) -> str:
    """Return the text for mean milliseconds of an interval, one mapping per rank."""
    names = [name for name in LEVELS if any(name in rank_times for rank_times in times)]
    values = {name: [rank_times.get(name, 0.0) for rank_times in times] for name in names}
    if option == "all":
        lines = ["times across ranks (ms):"]
        for name in names:
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {value:.2f}" for rank, value in enumerate(values[name])]
        return "\n".join(lines)
    head = "max time across ranks (ms):" if option == "max" else "(min, max) time across ranks (ms):"
    rows = []
    for name in names:
        low, high = min(values[name]), max(values[name])
        shown = f"{high:.2f}" if option == "max" else f"({low:.2f}, {high:.2f})"
        rows.append(f"    {f'{name} '.ljust(48, '.')}: {shown}")
    return "\n".join([head, *rows])
