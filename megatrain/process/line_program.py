"""A program of this host that answers each line of JSON that it is sent with one line, in order."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
from collections.abc import Sequence
from typing import Any


class ProgramEndedError(Exception):
    """The program has ended without an answer; `code` is its exit code, or minus the signal that killed it."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(exit_text(code))


class LineProgram:
    """The program that `command` starts. `options` go to `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._requests, self._answers = self.process.stdin, self.process.stdout

    def send(self, line: str) -> None:
        """Send a line of JSON. `receive` reports a program that has ended."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.write(line.encode() + b"\n")
            self._requests.flush()

    def has_answer(self) -> bool:
        """Return whether `receive` returns or raises without waiting for the program."""
        return bool(select.select([self._answers], [], [], 0)[0])

    def receive(self) -> Any:
        """Wait for an answer. Raises ProgramEndedError."""
        line = self._answers.readline()
        if not line.endswith(b"\n"):
            raise ProgramEndedError(self.process.wait())
        return json.loads(line)

    def end(self) -> None:
        """Close the pipes, which ends the program once it has answered, and wait for it."""
        with contextlib.suppress(BrokenPipeError):  # it ended before it read its last line
            self._requests.close()
        self._answers.close()
        self.process.wait()


def exit_text(code: int | None) -> str:
    """Return how a process ended: `killed by SIGKILL`, or `exit code 1`."""
    return f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
