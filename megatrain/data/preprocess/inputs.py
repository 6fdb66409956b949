"""The input files of preprocessing: found, looked at, and all that is wrong with them told at once.

    --input words -> globs expanded -> InputFile(path, kind, size, mtime)

The name says what a file is (`.gz`, `.bz2`, `.zst`, `.parquet`, anything else: JSON Lines), and its first bytes must agree.
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
"""Bytes 1 to 3 of a frame without content, which a .zst file may begin with."""
_WITHOUT_WORK: Final = "give --input regular files that can be read"


@dataclass(frozen=True)
class InputFile:
    """One file, as it was when the run began."""

    path: Path
    kind: Kind
    num_bytes: int
    mtime_ns: int

    def require_unchanged(self) -> None:
        """Raises InputError if the file is another one by now: half of the output would be made from each."""
        try:
            now = self.path.stat()
        except OSError as error:
            raise InputError(
                f"{self.path}: is gone while it is read: {error.strerror}", fix="restore it, run again"
            ) from error
        if (now.st_size, now.st_mtime_ns) != (self.num_bytes, self.mtime_ns):
            raise InputError(
                f"{self.path}: changed while it was read ({self.num_bytes} bytes at the start, {now.st_size} now)",
                fix="run again once nothing writes to it any more",
            )


def find_inputs(words: Sequence[str]) -> list[InputFile]:
    """The files that these paths and globs stand for, in this order; the matches of a glob by name.

    Raises:
        ConfigError: with what is wrong with each of them.
    """
    files: list[InputFile] = []
    problems: list[Problem] = []
    seen: dict[Path, Path] = {}
    for path in (path for word in words for path in _expanded(word, problems)):
        found = _look_at(path)
        problems += [found] if isinstance(found, Problem) else []
        files += [found] if isinstance(found, InputFile) else []
        first = seen.setdefault(path.resolve(), path)
        if first is not path:
            also = "" if str(first) == str(path) else f" ({first} is the same file)"
            problems.append(Problem(f"{path}: is given twice{also}", "name every file once"))
    if problems:
        raise ConfigError.of(problems)
    return files


def _expanded(word: str, problems: list[Problem]) -> Iterator[Path]:
    if not glob.has_magic(word) or os.path.lexists(word):
        yield Path(word)
        return
    matches = sorted(glob.glob(word, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
    if not matches:
        problems.append(Problem(f"--input {word}: no file matches", "look at the pattern with ls"))
    yield from map(Path, matches)


def _look_at(path: Path) -> InputFile | Problem:
    try:
        facts = path.stat()
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        if not stat.S_ISREG(facts.st_mode):  # opening a pipe would wait for its writer
            kind = kinds.get(stat.S_IFMT(facts.st_mode), "a device")
            inside = f", such as '{path}/*.jsonl'" if kind == "a folder" else ""
            return Problem(f"{path}: is {kind}, not a file", _WITHOUT_WORK + inside)
        with path.open("rb") as file:
            start = file.read(4)
    except FileNotFoundError:
        return _missing(path)
    except OSError as error:
        return Problem(f"{path}: cannot be read: {error.strerror}", _WITHOUT_WORK)
    kind_by_name = _kind_of(path)
    return _mismatch(path, kind_by_name, start) or InputFile(
        path, kind_by_name, facts.st_size, facts.st_mtime_ns
    )


def _missing(path: Path) -> Problem:
    if path.is_symlink():
        return Problem(f"{path}: is a link to {path.readlink()}, which does not exist", _WITHOUT_WORK)
    names = [entry.name for entry in path.parent.glob("*")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=3)
    fix = f"{path.parent} holds {', '.join(near)}" if near else "give --input the path of a JSON Lines file"
    return Problem(f"{path}: there is no such file", fix)


def _kind_of(path: Path) -> Kind:
    suffix = path.suffix.lower().removeprefix(".")
    return next((kind for kind in _MAGIC if kind == suffix), "plain")


def _mismatch(path: Path, kind: Kind, start: bytes) -> Problem | None:
    """What is wrong if a file's first bytes are not those of the kind that it is named as."""
    actual = next((other for other, magic in _MAGIC.items() if start.startswith(magic)), "plain")
    if actual == kind or (kind == "zst" and start[1:4] == _SKIPPABLE_ZST):
        return None
    if kind == "plain":
        return Problem(f"{path}: holds {actual} data, and is not named so", f"rename it to {path}.{actual}")
    if not start:
        return Problem(f"{path}: is empty, which no .{kind} file is", "leave it out, or make it again")
    is_text = f", but {actual} data" if actual != "plain" else f": it begins with {start!r}"
    return Problem(
        f"{path}: is no .{kind} file{is_text}", "name it after what it holds, or copy or make it again"
    )
