"""Times of the parts of an iteration, as `--timing-log-level` and `--timing-log-option` ask for them.

    (min, max) time across ranks (ms):
        forward-backward ...............................: (183.21, 184.02)
        optimizer ......................................: (12.50, 12.61)

Names, levels and this text are Megatron-LM's, so that scripts read it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.profiler import record_function

LEVELS = {
    "forward-backward": 1,
    "optimizer": 1,
    "batch-generator": 2,
    "optimizer-clip-main-grad": 2,
}
"""The level from which on each part is timed. A batch and the gradient norm are read on the host in between."""


class Timers:
    """Adds up the seconds of each part of one iteration on this rank."""

    def __init__(self, level: int, device: torch.device) -> None:
        self.level = level
        self._device = device
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:
        """What is done inside counts as part `name`, in profiles too. If it is timed, the GPU is waited for around it."""
        if LEVELS[name] > self.level:
            with record_function(name):
                yield
            return
        began = self._now()
        with record_function(name):
            yield
        self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - began

    def take(self) -> dict[str, float]:
        """Milliseconds of each part since this was called last."""
        taken = {name: 1000 * seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def across_ranks(times: Sequence[Mapping[str, float]], option: str) -> str:
    """Means of an interval in milliseconds, a mapping for each rank, as one text."""
    names = [name for name in LEVELS if any(name in of_rank for of_rank in times)]
    values = {name: [of_rank.get(name, 0.0) for of_rank in times] for name in names}
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
