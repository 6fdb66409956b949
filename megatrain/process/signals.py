"""Signals that stop this process, caught from its first instruction on: none is lost.

    start   a signal ends the process at once: there is nothing to save
    run     the first signal is a request to save and stop; a second one ends the process at once

The interpreter's C handler writes each signal to a pipe, which a thread reads: also while the main thread is blocked in a
collective or imports a library, which may swallow an exception. The exit codes at the start are 130 after SIGINT and 75, which
asks for another start, after other signals.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes longer to import than this module
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
STOPPED_EARLY = 75
_STDERR = 2
_SECONDS_OF_REPEATED_SIGNALS = 3.0


class Signals:
    """Stop signals of this process, caught inside the context; the main thread enters it.

    SIGHUP stays ignored if it is, as under nohup. A scheduler and the launcher that it stops often send a signal within moments
    of each other: that counts as one.
    """

    def __init__(self) -> None:
        self.number = 0
        """The first signal that was caught; 0: none."""
        self.before_exit: Callable[[int, str], None] = lambda _code, _reason: None
        """Called in another thread before a signal ends the process, with the exit code and the reason."""
        self.is_active = False
        self._report: Callable[[str], None] | None = None
        self._is_ending = False

    def __enter__(self) -> Self:
        held = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # delivered once they are caught
        import threading  # noqa: PLC0415 (takes ten times as long as all before)

        self._lock = threading.Lock()
        self._receiver, self._sender = os.pipe()
        os.set_blocking(self._sender, False)
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        self._former = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        self._previous: dict[int, Any] = {}
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._catch(number)
        os.register_at_fork(after_in_child=self._reset_in_child)  # for good: see `__exit__`
        self.is_active = True
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        return self

    def __exit__(self, *error: object) -> None:
        self.is_active = False
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former)
        os.close(self._sender)
        self._thread.join()
        os.close(self._receiver)
        # They belong to a run, whose model and process groups would stay with this object.
        self._report, self.before_exit = None, lambda _code, _reason: None

    def become_requests(
        self, report: Callable[[str], None], *, before_exit: Callable[[int, str], None], also: int
    ) -> None:
        """Let signals be requests to stop a run from now on: they set `number`.

        Args:
            report: prints a line about the request.
            before_exit: called before a second signal ends the process.
            also: another signal that is caught.
        """
        with self._lock:
            self._report, self.before_exit = report, before_exit
        if also not in self._previous:
            self._catch(also)

    def _catch(self, number: int) -> None:
        self._previous[number] = signal.signal(number, self._remember)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        if not self.number:
            self.number = number

    def _listen(self) -> None:
        """Read signals until the other end is closed: main function of the thread."""
        first: float | None = None
        while received := os.read(self._receiver, 1):
            number, now = received[0], time.monotonic()
            if signal.getsignal(number) != self._remember:
                continue  # of another handler in this process
            name = signal.Signals(number).name
            if first is None:
                first = now
                self._remember(number, None)
                self._act_on(number, name)
            elif now - first > _SECONDS_OF_REPEATED_SIGNALS:
                text = f"a second signal, {name}"
                self._end(128 + number, text, f"{text}: the process ends at once")

    def _act_on(self, number: int, name: str) -> None:
        """Report a request, or end the process, which may wait for other ranks to report, in another thread."""
        import threading  # noqa: PLC0415 (see `__enter__`)

        with self._lock:
            report = self._report
        if report is not None:
            report(f"> signal {name}: the run stops after this iteration; a second signal ends it at once")
            return
        code, text = (
            (130, "interrupted") if number == signal.SIGINT else (STOPPED_EARLY, f"stopped by {name}")
        )
        reason = f"signal {name} during the start"
        threading.Thread(target=self._end, args=(code, reason, text), daemon=True).start()

    def _end(self, code: int, reason: str, text: str) -> None:
        """End the process, whose main thread may be blocked in a collective; `text` is for stderr."""
        try:
            if not self._is_ending:
                self._is_ending = True
                self.before_exit(code, reason)
        except Exception as error:  # noqa: BLE001 (the process ends in any case, and says this)
            text += f"\n{error!r}"
        finally:
            with contextlib.suppress(OSError):  # stderr is closed
                os.write(_STDERR, f"{text}\n".encode())
            os._exit(code)

    def _reset_in_child(self) -> None:
        """Restore the handlers in a forked process: its signals are no signals of this process."""
        if self.is_active and os.getpid() != self._pid:
            signal.set_wakeup_fd(-1)
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            self.is_active = False
