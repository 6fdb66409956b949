"""Find and check the input files of preprocessing; all problems are reported at once.

    --input arguments -> globs expanded -> InputFile(path, kind, size, mtime)

The suffix determines the kind (`.gz`, `.bz2`, `.zst`, `.parquet`, else JSON Lines), and the first bytes must match it.
"""

from __future__ import annotations

import difflib
import glob
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from megatrain.config.errors import ConfigError, InputError, Problem

Kind = Literal["plain", "gz", "bz2", "zst", "parquet"]

_MAGIC: Final[dict[Kind, bytes]] = {
    "gz": b"\x1f\x8b",
    "bz2": b"BZh",
    "zst": b"\x28\xb5\x2f\xfd",
    "parquet": b"PAR1",
}
_SKIPPABLE_ZST: Final = b"\x2a\x4d\x18"
"""Bytes 1 to 3 of a skippable frame, which may begin a .zst file."""
_GIVE_FILES: Final = "give --input readable regular files"


@dataclass(frozen=True)
class InputFile:
    """An input file as it was at the start of the run."""

    path: Path
    kind: Kind
    num_bytes: int
    mtime_ns: int

    def require_unchanged(self) -> None:
        """Raise InputError if the file has changed: the output would mix both versions."""
        try:
            now = self.path.stat()
        except OSError as error:
            raise InputError(
                f"{self.path}: was removed while it was read: {error.strerror}",
                fix="restore it, then run again",
            ) from error
        if (now.st_size, now.st_mtime_ns) != (self.num_bytes, self.mtime_ns):
            raise InputError(
                f"{self.path}: changed while it was read ({self.num_bytes} bytes at the start, {now.st_size} now)",
                fix="run again after all writes to it have ended",
            )


def find_inputs(arguments: Sequence[str]) -> list[InputFile]:
    """Return the files of these paths and globs, in this order; the matches of a glob are sorted by name.

    Raises:
        ConfigError: with all problems.
    """
    files: list[InputFile] = []
    problems: list[Problem] = []
    seen: dict[Path, Path] = {}
    for path in (path for argument in arguments for path in _expand(argument, problems)):
        found = _check(path)
        problems += [found] if isinstance(found, Problem) else []
        files += [found] if isinstance(found, InputFile) else []
        first = seen.setdefault(path.resolve(), path)
        if first is not path:
            also = "" if str(first) == str(path) else f" ({first} is the same file)"
            problems.append(Problem(f"{path}: is given twice{also}", "give --input each file once"))
    if problems:
        raise ConfigError.of(problems)
    return files


def _expand(argument: str, problems: list[Problem]) -> Iterator[Path]:
    if not glob.has_magic(argument) or os.path.lexists(argument):
        yield Path(argument)
        return
    matches = sorted(glob.glob(argument, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
    if not matches:
        problems.append(
            Problem(f"--input {argument}: no file matches", "correct the pattern (try it with ls)")
        )
    yield from map(Path, matches)


def _check(path: Path) -> InputFile | Problem:
    try:
        status = path.stat()
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would block until a writer opens it
            kind = kinds.get(stat.S_IFMT(status.st_mode), "a device")
            inside = f", such as '{path}/*.jsonl'" if kind == "a folder" else ""
            return Problem(f"{path}: is {kind}, not a file", _GIVE_FILES + inside)
        with path.open("rb") as file:
            start = file.read(4)
    except FileNotFoundError:
        return _missing(path)
    except OSError as error:
        return Problem(f"{path}: cannot be read: {error.strerror}", _GIVE_FILES)
    kind_by_name = _kind_of(path)
    return _mismatch(path, kind_by_name, start) or InputFile(
        path, kind_by_name, status.st_size, status.st_mtime_ns
    )


def _missing(path: Path) -> Problem:
    if path.is_symlink():
        return Problem(f"{path}: is a broken link to {path.readlink()}", _GIVE_FILES)
    names = [entry.name for entry in path.parent.glob("*")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=3)
    fix = "give --input the path of an existing file" + (
        f": {path.parent} contains {', '.join(near)}" if near else ""
    )
    return Problem(f"{path}: there is no such file", fix)


def _kind_of(path: Path) -> Kind:
    suffix = path.suffix.lower().removeprefix(".")
    return next((kind for kind in _MAGIC if kind == suffix), "plain")


def _mismatch(path: Path, kind: Kind, start: bytes) -> Problem | None:
    """Return the problem if the first bytes of a file do not match the kind of its suffix."""
    actual = next((other for other, magic in _MAGIC.items() if start.startswith(magic)), "plain")
    if actual == kind or (kind == "zst" and start[1:4] == _SKIPPABLE_ZST):
        return None
    if kind == "plain":
        return Problem(
            f"{path}: contains {actual} data, but has no .{actual} suffix", f"rename it to {path}.{actual}"
        )
    if not start:
        return Problem(f"{path}: is empty, which no .{kind} file can be", "leave it out, or make it again")
    content = f"contains {actual} data" if actual != "plain" else f"begins with {start!r}"
    return Problem(
        f"{path}: is not a .{kind} file: it {content}",
        "rename it after its content, or copy or make it again",
    )
