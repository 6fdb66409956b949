"""Standard output and error of this process, whose reader may go away: a closed pipe or terminal, or a full disk.

    a write fails ─> the stream continues to /dev/null, so that no other write fails ─┬─> a tool ends, quietly
                                                                                     └─> a run sees `output_failure`, saves and stops

A stream that fails is never an error of the work that prints.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes longer to import than this module
    from collections.abc import Iterable
    from typing import Any, Self, TextIO

_CLOSED_PIPE = 141
"""Exit code of a program whose standard output is closed, as a shell shows it after SIGPIPE."""


class StandardStreams:
    """Standard output and error, which cannot fail inside the context.

    Args:
        ends_program: whether the program ends if its output cannot be written, with exit code 141 after a closed pipe, else 1.
    """

    def __init__(self, *, ends_program: bool) -> None:
        self.ends_program = ends_program

    def __enter__(self) -> Self:
        _open_closed_descriptors()
        self._former = sys.stdout, sys.stderr
        self._output = _Stream(sys.stdout or _to_nowhere(), self._on_failed_output)
        sys.stdout, sys.stderr = self._output, _Stream(sys.stderr or _to_nowhere())
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._output.flush()
            sys.stderr.flush()
        finally:
            sys.stdout, sys.stderr = self._former

    def _on_failed_output(self, error: OSError) -> None:
        is_quiet = self.ends_program and error.errno == errno.EPIPE
        if not is_quiet:
            sys.stderr.write(f"error: {self._output.failure}\n")
        if self.ends_program:
            raise SystemExit(_CLOSED_PIPE if is_quiet else 1)


class _Stream:
    """A text stream that continues to /dev/null once a write fails."""

    def __init__(self, stream: TextIO, on_failure: Any = lambda _: None) -> None:
        self._stream, self._on_failure = stream, on_failure
        self.failure: str | None = None
        """Description of the failure; None: there was none."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._discard(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._discard(error)

    def _discard(self, error: OSError) -> None:
        self.failure = f"standard output cannot be written: {error.strerror} (errno {error.errno})"
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        self._on_failure(error)


def output_failure() -> str | None:
    """Return why standard output could not be written; None: it could."""
    return sys.stdout.failure if isinstance(sys.stdout, _Stream) else None


def _open_closed_descriptors() -> None:
    """Open /dev/null as each standard stream that is closed: the next file would get its number, and what libraries print."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            with contextlib.suppress(OSError):
                os.open(os.devnull, os.O_RDWR)  # gets the smallest free number


def _to_nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123 (for the rest of the process)
