"""Reasons to end before the target: signals, a time limit, an interval.

what a rank was asked for (`flags`) ─> the largest over all ranks, with a step's report ─> the same `reason` on all
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import torch

from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.grid import RankGroup

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_SECONDS_OF_ONE_REQUEST = 10.0


class StopRequest:
    """Remembers what asked for the end.

    A signal often comes twice within moments, from a scheduler and from the launcher that it stops: that counts once.
    Another one, later, ends the process at once.
    """

    def __init__(
        self, *, exit_interval: int | None, exit_duration_in_mins: float | None, exit_signal: int
    ) -> None:
        self.exit_interval = exit_interval
        self.deadline = (
            None if exit_duration_in_mins is None else time.monotonic() + 60 * exit_duration_in_mins
        )
        self.signals = {*_SIGNALS, exit_signal}
        self.signal_number = 0
        self.signal_time = 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch the signals that schedulers and users send."""
        former = {number: signal.signal(number, self._remember) for number in self.signals}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def flags(self) -> tuple[int, int]:
        """What this rank was asked for: a signal's number, and 1 behind the time limit. All ranks share the largest."""
        return self.signal_number, int(self.deadline is not None and time.monotonic() >= self.deadline)

    def reason(self, iteration: int, flags: Sequence[int]) -> str | None:
        """Why to stop after this iteration, of the flags that all ranks share; None: go on."""
        if self.is_interval_over(iteration):
            return _asked(flags) or f"--exit-interval {self.exit_interval}"
        return _asked(flags)

    def is_interval_over(self, iteration: int) -> bool:
        """Whether --exit-interval ends the run behind this iteration."""
        return self.exit_interval is not None and iteration % self.exit_interval == 0

    def urgent_reason(self, world: RankGroup, device: torch.device) -> str | None:
        """Why to stop in the middle of an evaluation: a signal, or the time limit. The ranks wait for one another."""
        flags = torch.tensor(self.flags(), device=device)
        return _asked(all_reduce(flags, world, "max").tolist())

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal_number and now - self.signal_time > _SECONDS_OF_ONE_REQUEST:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self.signal_number:
            self.signal_number, self.signal_time = number, now


def _asked(flags: Sequence[int]) -> str | None:
    """What `StopRequest.flags` mean."""
    number, is_late = flags
    if number:
        return f"signal {signal.Signals(number).name}"
    return "--exit-duration-in-mins is over" if is_late else None
