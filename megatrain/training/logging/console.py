"""Terminal output of a run: whole lines, a progress bar below them, and messages about long phases.

     [2026-08-22 12:00:00.000000] iteration       10/     800 | ...        lines scroll
    12/800 ━━━╸───────────────  1 % | loss 8.21 | 5,312 tokens/s | 2:31 left   the bar stays at the bottom

    > loading the checkpoint, 10 s so far          during a phase, after ten seconds without output
    > loading the checkpoint took 12.3 s           after a phase of more than a second
    > started in 15.1 s: ... loading the checkpoint 12.3 s, ...      all phases of the start, once

This module does not import torch: it also reports on the import of torch.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import threading
import time
from collections.abc import Iterator

HEARTBEAT_SECONDS = 10.0
_SHORTEST_REPORTED_SECONDS = 1.0
_SECONDS_BETWEEN_BARS = 0.1
_CLEAR_LINE = "\r\x1b[2K"
_TO_ASCII = str.maketrans("━─", "=-")


class Console:
    """Standard output of one rank. `is_quiet`: print nothing, as on all ranks but rank 0."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        self.is_quiet = is_quiet
        self.last_print = time.monotonic()
        """Time of the last line."""
        self._lock = threading.RLock()
        self._bar = ""
        self._bar_at = 0.0

    def print(self, text: str) -> None:
        """Print whole lines, above the progress bar if there is one."""
        if self.is_quiet:
            return
        with self._lock:
            if self._bar:
                sys.stdout.write(_CLEAR_LINE)
            print(text)
            sys.stdout.write(self._bar)
            sys.stdout.flush()
            self.last_print = time.monotonic()

    def show_bar(self, *, done: int, total: int, status: str) -> None:
        """Redraw the progress bar, at most ten times a second and only on a terminal."""
        now = time.monotonic()
        if self.is_quiet or not sys.stdout.isatty() or (now - self._bar_at < _SECONDS_BETWEEN_BARS):
            return
        with self._lock:
            width = shutil.get_terminal_size().columns - 1
            text = bar_text(done=done, total=total, status=status, width=width)
            is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
            self._bar = text if is_unicode else text.translate(_TO_ASCII)
            self._bar_at = now
            sys.stdout.write(_CLEAR_LINE + self._bar)
            sys.stdout.flush()

    def columns(self) -> float:
        """Return the width of the terminal; infinite for a file or a pipe."""
        return shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf

    def remove_bar(self) -> None:
        """Erase the progress bar."""
        with self._lock:
            if self._bar:
                sys.stdout.write(_CLEAR_LINE)
                sys.stdout.flush()
            self._bar = ""


class Phases:
    """Timer of a run's phases; prints a message during long ones. Phases do not nest."""

    def __init__(
        self,
        console: Console,
        *,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        began: float | None = None,
    ) -> None:
        self.console = console
        self.began = time.monotonic() if began is None else began
        """Start of the program."""
        self.seconds: dict[str, float] = {}
        """Seconds of each phase so far; phases with the same name are summed."""
        self.current = ""
        """Name of the phase that began last."""
        self._heartbeat_seconds = heartbeat_seconds

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the start, such as `loading the checkpoint`."""
        start = time.monotonic()
        try:
            with self.heartbeat(name):
                yield
        finally:
            seconds = time.monotonic() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if seconds > _SHORTEST_REPORTED_SECONDS:
            self.console.print(f"> {name} took {seconds:.1f} s")

    @contextlib.contextmanager
    def heartbeat(self, name: str, *, min_seconds: float = 0.0) -> Iterator[None]:
        """Print `> name, N s so far` whenever nothing was printed for the heartbeat interval, or for `min_seconds` if longer."""
        ended, self.current = threading.Event(), name
        interval = max(self._heartbeat_seconds, min_seconds)
        thread = threading.Thread(target=self._print_heartbeats, args=(name, interval, ended), daemon=True)
        if not self.console.is_quiet:
            thread.start()
        try:
            yield
        finally:
            ended.set()

    def start_summary(self) -> str:
        """Return one line with the seconds of all phases so far."""
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
        return f"> started in {sum(self.seconds.values()):.1f} s: {parts}"

    def _print_heartbeats(self, name: str, interval: float, ended: threading.Event) -> None:
        start = time.monotonic()
        wait = interval
        while not ended.wait(max(wait, 0.01)):
            now = time.monotonic()
            silence = now - max(self.console.last_print, start)
            if silence >= interval:
                self.console.print(f"> {name}, {now - start:.0f} s so far")
                silence = 0.0
            wait = interval - silence


def bar_text(*, done: int, total: int, status: str, width: int) -> str:
    """Return a line of at most `width` columns: count, bar, percentage and status. Without space for a bar it is left out."""
    head = f"{done}/{total} "
    tail = f" {100 * done // max(total, 1):3d} % | {status}"
    bar_width = min(40, width - len(head) - len(tail))
    if bar_width < 5:
        return (head.strip() + tail)[:width]
    full = bar_width * done // max(total, 1)
    return f"{head}{'━' * full}{'─' * (bar_width - full)}{tail}"


def format_duration(seconds: float) -> str:
    """Return hours, minutes and seconds: `1:02:03`, or `2:03`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
