"""`metrics.jsonl`: a line for each iteration and evaluation, and its state when a run resumes.

    start ─> lines up to the resumed iteration stay; later ones are removed; damaged ones ─> metrics.damaged-1.jsonl
    write ─> append a line, or raise LogError and leave the file as it was          before each checkpoint ─> fsync

A damaged line is no JSON object with an iteration, or its iteration is out of order: a changed bit never removes other lines.
"""

from __future__ import annotations

import bisect
import errno
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.config.errors import MegatrainError
from megatrain.storage.files import create_file, describe_write_error, open_regular, replace_file, write_all

_MAX_NAMED = 3
"""Damaged lines that the log names."""
_MAX_FIRST_BYTES = 1 << 20
"""Bytes in which a file must have a line of metrics."""


class LogError(MegatrainError):
    """A log cannot be written."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            problem,
            fix="free some space or repair the storage, or continue without this log: --on-log-failure warn",
        )


@contextmanager
def report_log_errors(path: Path, flag: str = "", *, needed_bytes: int | None = None) -> Iterator[None]:
    """Convert OSError to LogError that names the flag, the file, the errno and, on a full disk, the needed and free bytes."""
    try:
        yield
    except OSError as error:
        text = describe_write_error(error, path, needed_bytes=needed_bytes)
        raise LogError(f"{flag} {text}" if flag else text) from error


class MetricsFile:
    """A file with one JSON object per line.

    Args:
        path: the file; created if missing.
        resumed_iteration: later lines, of an earlier attempt, are removed.

    Raises:
        LogError: the file cannot be written.
    """

    def __init__(self, path: Path, *, resumed_iteration: int) -> None:
        self.path = path
        self.note: str | None = None
        """The damaged lines that were kept aside, for the user; None: there were none."""
        with report_log_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                self.note = _remove_later_lines(path, resumed_iteration)
            self._descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._size = os.fstat(self._descriptor).st_size

    def write(self, values: Mapping[str, Any]) -> None:
        """Append a line; values that are not finite become null.

        Raises:
            LogError: the line was not written, and the file has no part of it; or the file was removed.
        """
        line = json.dumps(_finite(values)).encode() + b"\n"
        with report_log_errors(self.path, needed_bytes=len(line)):
            if os.fstat(self._descriptor).st_nlink == 0:  # writes would succeed and be lost
                raise FileNotFoundError(errno.ENOENT, "the file was removed", str(self.path))
            try:
                write_all(self._descriptor, line)
            except OSError:
                os.ftruncate(self._descriptor, self._size)
                raise
        self._size += len(line)

    def flush(self) -> None:
        """Flush all lines to disk. Raises LogError, also if the path names another file by now."""
        with report_log_errors(self.path):
            os.fsync(self._descriptor)
            if not os.path.samestat(os.fstat(self._descriptor), self.path.stat()):
                raise FileNotFoundError(errno.ENOENT, "the file was replaced", str(self.path))

    def close(self) -> None:
        os.close(self._descriptor)


def metrics_path(save: str | None, metrics_file: str | None) -> Path | None:
    """Return `--metrics-file`, else `metrics.jsonl` in the `--save` folder, else None."""
    if metrics_file is not None:
        return Path(metrics_file)
    return Path(save) / "metrics.jsonl" if save is not None else None


def is_metrics_file(path: Path) -> bool:
    """Return whether the file may be changed: it does not exist, is empty, or has a line of metrics near its start."""
    if not path.exists():
        return True
    with os.fdopen(open_regular(path), "rb") as file:
        start = file.read(_MAX_FIRST_BYTES)
    return not start.strip() or any(_Line.parse(line) is not None for line in start.split(b"\n"))


@dataclass(frozen=True)
class _Line:
    """Content of a line that decides where it belongs."""

    iteration: int
    is_evaluation: bool

    @classmethod
    def parse(cls, line: bytes) -> _Line | None:
        """Return None for anything but a line of metrics."""
        try:
            values = json.loads(line.decode())
        except (ValueError, RecursionError):
            return None
        number = values.get("iteration") if isinstance(values, dict) else None
        return cls(number, "validation" in values) if type(number) is int and number >= 0 else None


def _remove_later_lines(path: Path, iteration: int) -> str | None:
    """Keep the lines up to an iteration, and damaged ones in a file of their own; return a note about those."""
    with os.fdopen(open_regular(path), "rb") as file:
        parsed = [_Line.parse(line) for line in file]
    damaged = _damaged_lines(parsed)
    aside = _unused_name(path)
    if damaged:
        with os.fdopen(open_regular(path), "rb") as file:
            create_file(aside, (line for at, line in enumerate(file) if at in damaged))
    with os.fdopen(open_regular(path), "rb") as file:
        lines = enumerate(zip(parsed, file, strict=True))
        kept = (
            line if line.endswith(b"\n") else line + b"\n"
            for at, (found, line) in lines
            if at not in damaged and found is not None and found.iteration <= iteration and iteration
        )
        replace_file(path, kept)
    if not damaged:
        return None
    named = ", ".join(
        f"line {at + 1}: {reason}" for at, reason in itertools.islice(damaged.items(), _MAX_NAMED)
    )
    more = f", and {len(damaged) - _MAX_NAMED} more" if len(damaged) > _MAX_NAMED else ""
    return f"{path} has damaged lines ({named}{more}); they are kept in {aside}"


def _damaged_lines(lines: Sequence[_Line | None]) -> dict[int, str]:
    """Return the positions of damaged lines, from 0, each with the reason."""
    valid = {at: line for at, line in enumerate(lines) if line is not None}
    in_order = _longest_in_order(valid)
    return {
        at: "no JSON object with an iteration"
        if line is None
        else f"iteration {line.iteration} is out of order"
        for at, line in enumerate(lines)
        if at not in in_order
    }


def _longest_in_order(lines: Mapping[int, _Line]) -> set[int]:
    """Return the positions of the longest subsequence in which iterations rise, each followed by any evaluations of it.

    Source: patience sorting, Fredman, "On computing the length of longest increasing subsequences", 1975.
    """
    last_keys: list[int] = []  # smallest last key of a subsequence of each length
    last_positions: list[int] = []
    before: dict[int, int | None] = {}
    for at, line in lines.items():
        key = 2 * line.iteration + line.is_evaluation
        length = (bisect.bisect_right if line.is_evaluation else bisect.bisect_left)(last_keys, key)
        before[at] = last_positions[length - 1] if length else None
        last_keys[length : length + 1] = [key]
        last_positions[length : length + 1] = [at]
    found: set[int] = set()
    position = last_positions[-1] if last_positions else None
    while position is not None:
        found.add(position)
        position = before[position]
    return found


def _unused_name(path: Path) -> Path:
    names = (path.with_name(f"{path.stem}.damaged-{number}{path.suffix}") for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def _finite(value: Any) -> Any:
    """Return the value with None in place of numbers that are not finite, which JSON lacks."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
