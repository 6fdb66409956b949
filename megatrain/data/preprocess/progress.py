"""Progress of preprocessing: at most one line per second, and a summary at the end.

41.2% | 1,250,000 documents | 5,230 documents/s | 21.4 MB/s | 0:12:31 left
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Final

from megatrain.data.files import log_to_stderr

_LINE_SECONDS: Final = 1.0
"""Minimum time between two lines, regardless of the number of documents."""
_SILENT_SECONDS: Final = 10.0
"""Maximum time between two lines, even during one long document."""


class Progress:
    """Counts documents and input bytes (compressed), and logs them."""

    def __init__(
        self, *, total_bytes: int, log_interval: int, documents: int = 0, bytes_read: int = 0
    ) -> None:
        """Start counting; `documents` and `bytes_read` were counted by an interrupted run that is resumed."""
        self.num_documents = documents
        self._first = (documents, bytes_read)
        self._bytes_read = bytes_read
        self._total_bytes = total_bytes
        self._log_interval = log_interval
        self._next_documents = documents + log_interval
        self._start = self._logged_at = time.monotonic()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Also log while nothing is added, to distinguish a slow run from a hanging one."""
        ended = threading.Event()

        def log_while_silent() -> None:
            while not ended.wait(_LINE_SECONDS):
                if time.monotonic() - self._logged_at >= _SILENT_SECONDS:
                    self._log()

        thread = threading.Thread(target=log_while_silent, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def add(self, num_documents: int, *, bytes_read: int) -> None:
        """Count more documents; `bytes_read` is the total over the whole input so far."""
        self.num_documents += num_documents
        self._bytes_read = bytes_read
        is_due = self.num_documents >= self._next_documents
        if is_due and time.monotonic() - self._logged_at >= _LINE_SECONDS:
            self._log()

    def summary(self) -> str:
        """Return a line about the whole run."""
        documents, num_bytes, seconds = self._since_start()
        return (
            f"{self.num_documents:,} documents from {_amount(self._total_bytes)} in {_clock(seconds)}: "
            f"{documents / seconds:,.0f} documents/s, {num_bytes / seconds / 1e6:.2f} MB/s"
        )

    def _log(self) -> None:
        self._logged_at = time.monotonic()
        self._next_documents = (self.num_documents // self._log_interval + 1) * self._log_interval
        documents, num_bytes, seconds = self._since_start()
        left = max(self._total_bytes - self._bytes_read, 0) * seconds / num_bytes if num_bytes else None
        log_to_stderr(
            f"{self._bytes_read / max(self._total_bytes, 1):6.1%} | {self.num_documents:,} documents | "
            f"{documents / seconds:,.0f} documents/s | {num_bytes / seconds / 1e6:.2f} MB/s | "
            f"{'?' if left is None else _clock(left)} left"
        )

    def _since_start(self) -> tuple[int, int, float]:
        """Return documents, bytes and seconds of this run, without the run that it resumed."""
        documents, num_bytes = self._first
        seconds = max(time.monotonic() - self._start, 1e-9)
        return self.num_documents - documents, self._bytes_read - num_bytes, seconds


def _amount(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:,.1f} kB"


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
