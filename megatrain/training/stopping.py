"""Requests to stop before the target: signals, a time limit, a log that cannot be written, an interval.

`flags` of each rank ─> maximum over all ranks, with the report of a step ─> the same `reason` on all ranks
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_SECONDS_OF_REPEATED_SIGNALS = 10.0


class StopRequest:
    """Stop requests of this rank.

    A scheduler and the launcher that it stops often send a signal within moments of each other: that counts as one request.
    A later signal kills the process at once.
    """

    def __init__(
        self,
        *,
        exit_interval: int | None,
        exit_duration_in_mins: float | None,
        exit_signal: int,
        has_log_failed: Callable[[], bool] = lambda: False,
    ) -> None:
        self.exit_interval, self.has_log_failed = exit_interval, has_log_failed
        self.deadline = (
            None if exit_duration_in_mins is None else time.monotonic() + 60 * exit_duration_in_mins
        )
        self.signals = {*_SIGNALS, exit_signal}
        self.signal_number = 0
        self.signal_time = 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch stop signals inside the context."""
        previous = {number: signal.signal(number, self._remember) for number in self.signals}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def flags(self) -> tuple[int, ...]:
        """Return the requests of this rank: the number of a signal or 0, 1 after the time limit, 1 without a log."""
        is_late = self.deadline is not None and time.monotonic() >= self.deadline
        return self.signal_number, int(is_late), int(self.has_log_failed())

    def reason(self, iteration: int, flags: Sequence[int]) -> str | None:
        """Return the reason to stop after this iteration, or None; `flags` are the maximum over all ranks."""
        if self.is_interval_over(iteration):
            return _text(flags) or f"--exit-interval {self.exit_interval}"
        return _text(flags)

    def is_interval_over(self, iteration: int) -> bool:
        """Return True if --exit-interval stops the run after this iteration."""
        return self.exit_interval is not None and iteration % self.exit_interval == 0

    def urgent_reason(self, flags: Sequence[int]) -> str | None:
        """Return the reason to stop during an evaluation, or None; `flags` are the maximum over all ranks."""
        return _text(flags)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal_number and now - self.signal_time > _SECONDS_OF_REPEATED_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self.signal_number:
            self.signal_number, self.signal_time = number, now


def _text(flags: Sequence[int]) -> str | None:
    """Return the request in `StopRequest.flags` as text, or None."""
    number, is_late, has_log_failed = flags
    if number:
        return f"signal {signal.Signals(number).name}"
    if has_log_failed:
        return "a log cannot be written"
    return "--exit-duration-in-mins is over" if is_late else None
