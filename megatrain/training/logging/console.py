"""What a run prints: whole lines, and on a terminal a progress bar below them.

     [2026-08-22 12:00:00.000000] iteration       10/     800 | ...        lines scroll
    12/800 ━━━╸───────────────  1 % | loss 8.21 | 5,312 tokens/s | 2:31 left   the bar stays at the bottom

Nothing here imports torch, so that a run can say what it does while torch is being imported.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time

_SECONDS_BETWEEN_BARS = 0.1
_CLEAR_LINE = "\r\x1b[2K"
_IN_ASCII = str.maketrans("━─", "=-")


class Console:
    """Prints for one rank. `is_quiet`: another rank tells the user, and this one nothing."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        self.is_quiet = is_quiet
        self.said_at = time.monotonic()
        """When something was printed last."""
        self._lock = threading.RLock()
        self._bar = ""
        self._bar_at = 0.0

    def say(self, text: str) -> None:
        """Print whole lines, above the bar if there is one."""
        if self.is_quiet:
            return
        with self._lock:
            if self._bar:
                sys.stdout.write(_CLEAR_LINE)
            print(text)
            sys.stdout.write(self._bar)
            sys.stdout.flush()
            self.said_at = time.monotonic()

    def show_bar(self, *, done: int, total: int, facts: str) -> None:
        """Draw the bar anew, unless it was drawn a moment ago. Nothing happens where stdout is no terminal."""
        now = time.monotonic()
        if self.is_quiet or not sys.stdout.isatty() or (now - self._bar_at < _SECONDS_BETWEEN_BARS):
            return
        with self._lock:
            width = shutil.get_terminal_size().columns - 1
            text = bar_text(done=done, total=total, facts=facts, width=width)
            is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
            self._bar = text if is_unicode else text.translate(_IN_ASCII)
            self._bar_at = now
            sys.stdout.write(_CLEAR_LINE + self._bar)
            sys.stdout.flush()

    def remove_bar(self) -> None:
        """Leave the terminal as if there had been none."""
        with self._lock:
            if self._bar:
                sys.stdout.write(_CLEAR_LINE)
                sys.stdout.flush()
            self._bar = ""


def bar_text(*, done: int, total: int, facts: str, width: int) -> str:
    """One line of at most `width` columns: as much of the bar as the words leave room for."""
    head = f"{done}/{total} "
    tail = f" {100 * done // max(total, 1):3d} % | {facts}"
    room = min(40, width - len(head) - len(tail))
    if room < 5:
        return (head.strip() + tail)[:width]
    full = room * done // max(total, 1)
    return f"{head}{'━' * full}{'─' * (room - full)}{tail}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: `1:02:03`, or `2:03`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
