"""What preprocessing tells while it runs: one line now and then, a summary at the end.

41.2% | 1,250,000 documents | 5,230 documents/s | 21.4 MB/s | 0:12:31 left
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Final

_LINE_SECONDS: Final = 1.0
"""Time between two lines at least, however many documents there are."""
_SILENT_SECONDS: Final = 10.0
"""Time between two lines at most, however long one document takes."""


def say(text: str) -> None:
    """Tell the user; results alone belong to stdout."""
    print(text, file=sys.stderr, flush=True)


class Progress:
    """Counts documents and bytes as they lie on the disk."""

    def __init__(
        self, *, total_bytes: int, log_interval: int, documents: int = 0, bytes_read: int = 0
    ) -> None:
        """`documents`, `bytes_read`: what a former run did already."""
        self.num_documents = documents
        self._first = (documents, bytes_read)
        self._bytes_read = bytes_read
        self._total_bytes = total_bytes
        self._log_interval = log_interval
        self._next_documents = documents + log_interval
        self._start = self._said_at = time.monotonic()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Also tell something while nothing moves, so that a slow run does not look like one that hangs."""
        ended = threading.Event()

        def tell() -> None:
            while not ended.wait(_LINE_SECONDS):
                if time.monotonic() - self._said_at >= _SILENT_SECONDS:
                    self._say()

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        try:
            yield
        finally:
            ended.set()
            teller.join()

    def add(self, num_documents: int, *, bytes_read: int) -> None:
        """More documents are done; `bytes_read` of the input in all."""
        self.num_documents += num_documents
        self._bytes_read = bytes_read
        is_due = self.num_documents >= self._next_documents
        if is_due and time.monotonic() - self._said_at >= _LINE_SECONDS:
            self._say()

    def summary(self) -> str:
        """All of it, once it is done."""
        documents, num_bytes, seconds = self._moved()
        return (
            f"{self.num_documents:,} documents from {_amount(self._total_bytes)} in {_clock(seconds)}: "
            f"{documents / seconds:,.0f} documents/s, {num_bytes / seconds / 1e6:.2f} MB/s"
        )

    def _say(self) -> None:
        self._said_at = time.monotonic()
        self._next_documents = (self.num_documents // self._log_interval + 1) * self._log_interval
        documents, num_bytes, seconds = self._moved()
        left = max(self._total_bytes - self._bytes_read, 0) * seconds / num_bytes if num_bytes else None
        say(
            f"{self._bytes_read / max(self._total_bytes, 1):6.1%} | {self.num_documents:,} documents | "
            f"{documents / seconds:,.0f} documents/s | {num_bytes / seconds / 1e6:.2f} MB/s | "
            f"{'?' if left is None else _clock(left)} left"
        )

    def _moved(self) -> tuple[int, int, float]:
        """Documents, bytes and seconds of this run alone."""
        documents, num_bytes = self._first
        seconds = max(time.monotonic() - self._start, 1e-9)
        return self.num_documents - documents, self._bytes_read - num_bytes, seconds


def _amount(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:,.1f} kB"


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
