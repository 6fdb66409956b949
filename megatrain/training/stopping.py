"""Requests to stop before the target: signals, a file, a time limit, a log that cannot be written, an interval, a phase's end.

`flags` of each rank ─> maximum over all ranks, with the report of a step ─> the same `reason` on all ranks

A second signal ends the process at once: see `megatrain.process.signals`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from megatrain.process.signals import Signals

_SECONDS_BETWEEN_LOOKS = 1.0


class StopRequest:
    """Stop requests of this rank.

    Args:
        signals: of this process; None: they are caught while `listening`.
        began: start of the program, from which --exit-duration-in-mins counts; None: now.
        exit_file: a file whose existence is a request; None on all ranks but rank 0.
        has_log_failed, has_console_failed: return whether a log, or standard output, could not be written.
        report: prints a line.
        before_kill: called in another thread before a second signal ends the process, with its exit code and the reason.
    """

    def __init__(
        self,
        signals: Signals | None = None,
        *,
        exit_interval: int | None,
        phase_ends: Sequence[int] = (),
        exit_duration_in_mins: float | None,
        began: float | None = None,
        exit_signal: int,
        exit_file: Path | None = None,
        has_log_failed: Callable[[], bool] = lambda: False,
        has_console_failed: Callable[[], bool] = lambda: False,
        report: Callable[[str], None] = lambda _: None,
        before_kill: Callable[[int, str], None] = lambda _code, _reason: None,
    ) -> None:
        self.signals, self.exit_signal = signals or Signals(), exit_signal
        self.exit_interval, self.phase_ends = exit_interval, phase_ends
        self.has_log_failed, self.has_console_failed = has_log_failed, has_console_failed
        self.exit_file, self.report, self.before_kill = exit_file, report, before_kill
        began = time.monotonic() if began is None else began
        self.deadline = None if exit_duration_in_mins is None else began + 60 * exit_duration_in_mins
        self._is_file_there, self._next_look = False, 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals as requests, from now on."""
        with ExitStack() as until_end:
            if not self.signals.is_active:
                until_end.enter_context(self.signals)
            self.signals.become_requests(self.report, before_exit=self.before_kill, also=self.exit_signal)
            yield

    def flags(self) -> tuple[int, ...]:
        """Return the requests of this rank: the number of a signal or 0; 1 after the time limit, without a log or console, with the file."""
        is_late = self.deadline is not None and time.monotonic() >= self.deadline
        failed = int(self.has_log_failed()), int(self.has_console_failed())
        return self.signals.number, int(is_late), *failed, int(self._has_file())

    def reason(self, iteration: int, flags: Sequence[int]) -> str | None:
        """Return the reason to stop after this iteration, or None; `flags` are the maximum over all ranks."""
        urgent = self.urgent_reason(flags)
        if urgent or not self.is_interval_over(iteration):
            return urgent
        if iteration in self.phase_ends:
            return f"--phase-transition-iterations {iteration}"
        return f"--exit-interval {self.exit_interval}"

    def is_interval_over(self, iteration: int) -> bool:
        """Return True if --exit-interval or --phase-transition-iterations stops the run after this iteration."""
        is_over = self.exit_interval is not None and iteration % self.exit_interval == 0
        return is_over or iteration in self.phase_ends

    def urgent_reason(self, flags: Sequence[int]) -> str | None:
        """Return the reason to stop during an evaluation, or None; `flags` are the maximum over all ranks."""
        number, is_late, has_log_failed, has_console_failed, has_file = flags
        if number:
            return f"signal {signal.Signals(number).name}"
        if has_log_failed:
            return "a log cannot be written"
        if has_console_failed:
            return "standard output cannot be written"
        if has_file:
            return "the file of --exit-file is there"
        return "--exit-duration-in-mins is over" if is_late else None

    def _has_file(self) -> bool:
        """Look for the file, at most once a second: it may be on a network file system."""
        now = time.monotonic()
        if self.exit_file is not None and now >= self._next_look:
            self._next_look = now + _SECONDS_BETWEEN_LOOKS
            with suppress(OSError):  # a network file system may fail for a moment
                self._is_file_there = self.exit_file.exists()
        return self._is_file_there
