"""Requests to stop before the target: signals, a file, a time limit, a log that cannot be written, an interval, a phase's end.

`flags` of each rank ─> maximum over all ranks, with the report of a step ─> the same `reason` on all ranks

A second signal ends the process at once, also while its main thread is blocked in a collective: the interpreter's C handler
writes each signal to a socket, which a thread reads.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_SECONDS_OF_REPEATED_SIGNALS = 3.0
_SECONDS_BETWEEN_LOOKS = 1.0


class StopRequest:
    """Stop requests of this rank.

    A scheduler and the launcher that it stops often send a signal within moments of each other: that counts as one request.

    Args:
        exit_file: a file whose existence is a request; None on all ranks but rank 0.
        has_log_failed: returns whether a log could not be written.
        report: prints a line.
        before_kill: called in another thread before a second signal ends the process, with its exit code and the reason.
    """

    def __init__(
        self,
        *,
        exit_interval: int | None,
        phase_ends: Sequence[int] = (),
        exit_duration_in_mins: float | None,
        exit_signal: int,
        exit_file: Path | None = None,
        has_log_failed: Callable[[], bool] = lambda: False,
        report: Callable[[str], None] = lambda _: None,
        before_kill: Callable[[int, str], None] = lambda _code, _reason: None,
    ) -> None:
        self.exit_interval, self.phase_ends, self.has_log_failed = exit_interval, phase_ends, has_log_failed
        self.exit_file, self.report, self.before_kill = exit_file, report, before_kill
        self.deadline = (
            None if exit_duration_in_mins is None else time.monotonic() + 60 * exit_duration_in_mins
        )
        self.signals = {*_SIGNALS, exit_signal}
        self.signal_number = 0
        self._is_file_there, self._next_look = False, 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch stop signals inside the context."""
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        thread = threading.Thread(target=self._listen, args=(receiver,), name="signals", daemon=True)
        thread.start()
        former = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        previous = {number: signal.signal(number, self._remember) for number in self.signals}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(former)
            sender.close()
            thread.join()
            receiver.close()

    def flags(self) -> tuple[int, ...]:
        """Return the requests of this rank: the number of a signal or 0; 1 after the time limit, without a log, with the file."""
        is_late = self.deadline is not None and time.monotonic() >= self.deadline
        return self.signal_number, int(is_late), int(self.has_log_failed()), int(self._has_file())

    def reason(self, iteration: int, flags: Sequence[int]) -> str | None:
        """Return the reason to stop after this iteration, or None; `flags` are the maximum over all ranks."""
        if self.is_interval_over(iteration):
            is_phase_end = iteration in self.phase_ends
            name = "phase-transition-iterations" if is_phase_end else "exit-interval"
            return _text(flags) or f"--{name} {iteration if is_phase_end else self.exit_interval}"
        return _text(flags)

    def is_interval_over(self, iteration: int) -> bool:
        """Return True if --exit-interval or --phase-transition-iterations stops the run after this iteration."""
        is_over = self.exit_interval is not None and iteration % self.exit_interval == 0
        return is_over or iteration in self.phase_ends

    def urgent_reason(self, flags: Sequence[int]) -> str | None:
        """Return the reason to stop during an evaluation, or None; `flags` are the maximum over all ranks."""
        return _text(flags)

    def _has_file(self) -> bool:
        """Look for the file, at most once a second: it may be on a network file system."""
        now = time.monotonic()
        if self.exit_file is not None and now >= self._next_look:
            self._next_look = now + _SECONDS_BETWEEN_LOOKS
            with suppress(OSError):  # a network file system may fail for a moment
                self._is_file_there = self.exit_file.exists()
        return self._is_file_there

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        if not self.signal_number:
            self.signal_number = number

    def _listen(self, receiver: socket.socket) -> None:
        """Read signals until the other end is closed: main function of a thread."""
        first: float | None = None
        while received := receiver.recv(1):
            number, now = received[0], time.monotonic()
            if number not in self.signals:
                continue  # of another handler in this process
            name = signal.Signals(number).name
            if first is None:
                first = now
                self._remember(number, None)
                self.report(
                    f"> signal {name}: the run stops after this iteration; a second signal ends it at once"
                )
            elif now - first > _SECONDS_OF_REPEATED_SIGNALS:
                self.before_kill(128 + number, f"a second signal, {name}")
                print(f"a second signal, {name}: the process ends at once", file=sys.stderr, flush=True)
                os._exit(128 + number)


def _text(flags: Sequence[int]) -> str | None:
    """Return the request in `StopRequest.flags` as text, or None."""
    number, is_late, has_log_failed, has_file = flags
    if number:
        return f"signal {signal.Signals(number).name}"
    if has_log_failed:
        return "a log cannot be written"
    if has_file:
        return "the file of --exit-file is there"
    return "--exit-duration-in-mins is over" if is_late else None
