"""Handling of bad lines, which contain no document: stop the run, skip them, or quarantine them.

stop        an error with the first ones, each with file:line, and their number in the megabytes that follow
skip        counted; the first ones are logged
quarantine  as skip, and written to <prefix>.bad_lines.jsonl: file, line, reason, and the line itself
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Final, Literal, NoReturn

from megatrain.config.errors import InputError
from megatrain.data.files import report_write_errors
from megatrain.data.preprocess.documents import BadLine
from megatrain.storage.files import fsync, is_start_intact, open_regular

Policy = Literal["stop", "skip", "quarantine"]

NUM_LOGGED: Final = 20
"""Bad lines that are logged; the others are only counted."""


_NUM_REPORTED: Final = 10
"""Bad lines that the error of a run that stops shows; the others are only counted."""
_LOOK_ON_BYTES: Final = 64_000_000
"""Bytes that a run that stops reads after its first bad line, to count others."""


class BadLines:
    """Counts bad lines and applies a policy to them."""

    def __init__(self, policy: Policy, prefix: str, log: Callable[[str], None]) -> None:
        self.path, self._partial = bad_lines_files(prefix)
        self.num_lines = 0
        self.crc32 = 0
        """Checksum of the partial file."""
        self._policy = policy
        self._log = log
        self._num_logged = 0
        self._file: IO[bytes] | None = None
        self._shown: list[BadLine] = []
        self._look_on_until = 0

    @property
    def stops(self) -> bool:
        """True if a bad line stops the run, which only looks for others: it writes nothing any more."""
        return bool(self._shown)

    @property
    def has_quarantined(self) -> bool:
        """True if bad lines were written to the quarantine file."""
        return self._policy == "quarantine" and self.num_lines > 0

    def open(self, *, num_bytes: int) -> None:
        """Open the partial file, and keep its first `num_bytes` bytes, written by the run that is resumed."""
        if self._policy == "quarantine":
            with report_write_errors(self._partial):
                new = 0 if num_bytes else os.O_CREAT | os.O_TRUNC
                self._file = os.fdopen(open_regular(self._partial, os.O_RDWR | new), "r+b")
                self._file.truncate(num_bytes)
                self._file.seek(num_bytes)

    def handle(self, bad_lines: Sequence[BadLine], *, bytes_read: int) -> None:
        """Apply the policy to the bad lines that precede a position of the input. Raises InputError if it stops the run."""
        if self._policy == "stop":
            if bad_lines and not self.stops:
                self._look_on_until = bytes_read + _LOOK_ON_BYTES
            self._shown += bad_lines[: _NUM_REPORTED - len(self._shown)]
            self.num_lines += len(bad_lines)
            if self.stops and bytes_read >= self._look_on_until:
                self._stop(f"so far; reading ended {_LOOK_ON_BYTES // 1_000_000} MB after the first one")
            return
        for bad in bad_lines:
            self.num_lines += 1
            self._log_line(bad)
            if self._policy == "quarantine":
                assert self._file is not None
                with report_write_errors(self._partial):
                    line = json.dumps(_entry(bad)).encode() + b"\n"
                    self._file.write(line)
                    self.crc32 = zlib.crc32(line, self.crc32)

    def finish(self) -> None:
        """Raise InputError at the end of the input, if a bad line stops the run."""
        if self.stops:
            self._stop("in all of the input")

    def _stop(self, where: str) -> NoReturn:
        """Raise the error of all bad lines so far."""
        lines, more = list(map(str, self._shown)), self.num_lines - len(self._shown)
        fix = self._shown[0].fix
        if self.num_lines > 1:
            lines.append(f"{f'and {more:,} more: ' * bool(more)}{self.num_lines:,} bad lines {where}")
            fixes = dict.fromkeys(bad.fix.removesuffix(", or correct the line") for bad in self._shown)
            fix = ", ".join([one for one in fixes if one != "correct the line"] + ["correct the lines"])
        fix += ", or skip such lines with --on-bad-line skip"
        raise InputError("\n  ".join(lines), fix=fix)

    def num_bytes(self) -> int:
        """Flush the partial file and return its size."""
        if self._file is None:
            return 0
        with report_write_errors(self._partial):
            fsync(self._file)
            return self._file.tell()

    def can_resume(self, num_bytes: int) -> bool:
        """Return whether the partial file has at least this many bytes, which match `crc32`."""
        return not num_bytes or is_start_intact(self._partial, num_bytes=num_bytes, crc32=self.crc32)

    def can_commit(self, num_bytes: int) -> bool:
        """Return whether the completed file, of this many bytes, exists under its partial or final name, and matches `crc32`."""
        path = next((path for path in (self._partial, self.path) if path.is_file()), self.path)
        if not num_bytes or not path.is_file():
            return not num_bytes
        is_whole = path.stat().st_size == num_bytes
        return is_whole and is_start_intact(path, num_bytes=num_bytes, crc32=self.crc32)

    def commit(self) -> None:
        """Rename the partial file to its final name, and remove the file of an earlier run. Idempotent."""
        self.close()
        if self._partial.is_file() and self._partial.stat().st_size:
            self._partial.replace(self.path)
        elif not self.has_quarantined:
            self.path.unlink(missing_ok=True)
        self._partial.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the partial file."""
        self.close()
        self._partial.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the partial file and keep it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _log_line(self, bad: BadLine) -> None:
        if self._num_logged < NUM_LOGGED:
            self._log(f"skipped: {bad}")
        elif self._num_logged == NUM_LOGGED:
            self._log("skipped: further bad lines are only counted")
        self._num_logged += 1


def bad_lines_files(prefix: str) -> tuple[Path, Path]:
    """Return the paths of the quarantine file and its partial file."""
    return Path(f"{prefix}.bad_lines.jsonl"), Path(f"{prefix}.bad_lines.jsonl.partial")


def _entry(bad: BadLine) -> dict[str, Any]:
    """Return the JSON entry of a bad line: with its text, its bytes if they are not text, or its offset if it is too long."""
    number: dict[str, Any] = {} if bad.unit == "file" else {bad.unit: bad.number}
    entry = {"file": bad.file, **number, "reason": bad.reason}
    if bad.content is None:
        return entry | {"offset": bad.offset, "bytes": bad.num_bytes}
    try:
        return entry | {"text": bad.content.decode()}
    except UnicodeDecodeError:
        return entry | {"base64": base64.b64encode(bad.content).decode()}
