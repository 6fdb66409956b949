"""What becomes of lines that are no documents: they stop the run, are left out, or are put aside.

stop        an error with file:line
skip        counted, and the first ones printed
quarantine  the same, and written to <prefix>.bad_lines.jsonl: file, line, reason, and the line itself
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Final, Literal

from megatrain.config.errors import InputError
from megatrain.data.files import flush, writing
from megatrain.data.preprocess.lines import BadLine

Policy = Literal["stop", "skip", "quarantine"]

SHOWN: Final = 20
"""Bad lines printed one by one; the others are counted."""


class BadLines:
    """Counts bad lines and does with them as the policy says."""

    def __init__(self, policy: Policy, prefix: str, say: Callable[[str], None]) -> None:
        self.path, self._partial = bad_lines_files(prefix)
        self.num_lines = 0
        self._policy = policy
        self._say = say
        self._num_shown = 0
        self._file: IO[bytes] | None = None

    @property
    def are_put_aside(self) -> bool:
        """Whether there are any, and they are in the file."""
        return self._policy == "quarantine" and self.num_lines > 0

    def open(self, *, num_bytes: int) -> None:
        """Begin, or go on behind this many bytes that a former run put aside."""
        if self._policy == "quarantine":
            with writing(self._partial):
                self._file = self._partial.open("r+b" if num_bytes else "wb")
                self._file.truncate(num_bytes)
                self._file.seek(num_bytes)

    def take(self, bad_lines: Sequence[BadLine]) -> None:
        """Raises InputError if they stop the run."""
        for bad in bad_lines:
            if self._policy == "stop":
                raise InputError(
                    str(bad),
                    fix="mend the line, or leave such lines out: --on-bad-line skip (or quarantine)",
                )
            self.num_lines += 1
            self._show(bad)
            if self._policy == "quarantine":
                assert self._file is not None
                with writing(self._partial):
                    self._file.write(json.dumps(_entry(bad)).encode() + b"\n")

    def num_bytes(self) -> int:
        """Bytes put aside so far; all of them are on the disk."""
        if self._file is None:
            return 0
        with writing(self._partial):
            flush(self._file)
            return self._file.tell()

    def can_resume(self, num_bytes: int) -> bool:
        """Whether the partial file holds this much."""
        return not num_bytes or (self._partial.is_file() and self._partial.stat().st_size >= num_bytes)

    def can_publish(self, num_bytes: int) -> bool:
        """Whether a file that was complete with this much is there, under either name."""
        sizes = [path.stat().st_size for path in (self._partial, self.path) if path.is_file()]
        return not num_bytes or num_bytes in sizes[:1]

    def publish(self) -> None:
        """Give the file its name; that of a former run goes in any case. May be done again."""
        self.close()
        if self._partial.is_file() and self._partial.stat().st_size:
            self._partial.replace(self.path)
        elif not self.are_put_aside:
            self.path.unlink(missing_ok=True)
        self._partial.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the partial file."""
        self.close()
        self._partial.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the partial file, and leave it where it is."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _show(self, bad: BadLine) -> None:
        if self._num_shown < SHOWN:
            self._say(f"left out: {bad}")
        elif self._num_shown == SHOWN:
            self._say("left out: further bad lines are only counted")
        self._num_shown += 1


def bad_lines_files(prefix: str) -> tuple[Path, Path]:
    """The file of a prefix, and the one that is being written."""
    return Path(f"{prefix}.bad_lines.jsonl"), Path(f"{prefix}.bad_lines.jsonl.partial")


def _entry(bad: BadLine) -> dict[str, Any]:
    """All about a bad line: its text if it is text, else its bytes, or where it lies if it is too long."""
    entry = {"file": bad.file, "row" if bad.is_row else "line": bad.number, "reason": bad.reason}
    if bad.content is None:
        return entry | {"offset": bad.offset, "bytes": bad.num_bytes}
    try:
        return entry | {"text": bad.content.decode()}
    except UnicodeDecodeError:
        return entry | {"base64": base64.b64encode(bad.content).decode()}
