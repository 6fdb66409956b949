"""Reasons to end before the target: signals, a time limit, an interval. The ranks agree on them after each step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
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

    def reason(self, iteration: int, world: RankGroup, device: torch.device) -> str | None:
        """Why to stop after this iteration, equal on all ranks; None: go on."""
        if self.exit_interval and iteration % self.exit_interval == 0:
            return self.urgent_reason(world, device) or f"--exit-interval {self.exit_interval}"
        return self.urgent_reason(world, device)

    def urgent_reason(self, world: RankGroup, device: torch.device) -> str | None:
        """Why to stop now, in the middle of an evaluation too: a signal, or the time limit."""
        is_late = self.deadline is not None and time.monotonic() >= self.deadline
        flags = torch.tensor([self.signal_number, int(is_late)], device=device)
        number, is_late = all_reduce(flags, world, "max").tolist()
        if number:
            return f"signal {signal.Signals(number).name}"
        if is_late:
            return "--exit-duration-in-mins is over"
        return None

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal_number and now - self.signal_time > _SECONDS_OF_ONE_REQUEST:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self.signal_number:
            self.signal_number, self.signal_time = number, now
