"""Find and check the input files of preprocessing; all problems are reported at once.

    --input arguments -> globs expanded, folders listed -> InputFile(path, content, compression, size, mtime)

The suffixes determine the content (`.parquet`, `.txt`, `.md`, else JSON Lines) and the compression (`.gz`, `.bz2`, `.zst`).
The first bytes must match them.
"""

from __future__ import annotations

import difflib
import glob
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from megatrain.config.errors import ConfigError, InputError, Problem
from megatrain.data.files import log_to_stderr

InputFormat = Literal["auto", "jsonl", "text"]
"""auto: by suffix."""
Content = Literal["jsonl", "text", "parquet"]

_COMPRESSIONS: Final = {"gz": b"\x1f\x8b", "bz2": b"BZh", "zst": b"\x28\xb5\x2f\xfd"}
_MAGIC: Final = {**_COMPRESSIONS, "parquet": b"PAR1"}
_LINES: Final = ("jsonl", "ndjson")
"""Suffixes of JSON Lines only; .json may also be an array."""
_CONTENTS: Final[dict[str, Content]] = {
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "json": "jsonl",
    "txt": "text",
    "md": "text",
    "parquet": "parquet",
}
"""Content of a file by its suffix. Folders are searched for these; a given file of another suffix is JSON Lines."""
_SKIPPABLE_ZST: Final = b"\x2a\x4d\x18"
"""Bytes 1 to 3 of a skippable frame, which may begin a .zst file."""
_GIVE_FILES: Final = "give --input readable regular files"


@dataclass(frozen=True)
class InputFile:
    """An input file as it was at the start of the run."""

    path: Path
    content: Content
    compression: str
    """Suffix without its dot; empty: none."""
    num_bytes: int
    mtime_ns: int
    folder: Path | None = None
    """The folder of the --input argument that contains this file."""

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


def find_inputs(
    arguments: Sequence[str],
    input_format: InputFormat = "auto",
    log: Callable[[str], None] = log_to_stderr,
) -> list[InputFile]:
    """Return the files of these paths, globs and folders, in this order.

    The matches of a glob are sorted by name. The files below a folder are sorted by path, component by component;
    names that start with a dot are left out.

    Args:
        log: receives a line for each folder with files that are not read.

    Raises:
        ConfigError: with all problems.
    """
    files: list[InputFile] = []
    problems: list[Problem] = []
    seen: dict[Path, Path] = {}
    for path, folder in (
        found for argument in arguments for found in _expand(argument, input_format, problems, log)
    ):
        found = _check(path, folder, input_format)
        problems += [found] if isinstance(found, Problem) else []
        files += [found] if isinstance(found, InputFile) else []
        first = seen.setdefault(path.resolve(), path)
        if first is not path:
            also = "" if str(first) == str(path) else f" ({first} is the same file)"
            problems.append(Problem(f"{path}: is given twice{also}", "give --input each file once"))
    if problems:
        raise ConfigError.of(problems)
    return files


def _expand(
    argument: str, input_format: InputFormat, problems: list[Problem], log: Callable[[str], None]
) -> Iterator[tuple[Path, Path | None]]:
    """Yield the files of an argument, each with its folder if the argument names one."""
    matches = [argument]
    if glob.has_magic(argument) and not os.path.lexists(argument):
        matches = sorted(glob.glob(argument, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
        if not matches:
            problems.append(
                Problem(f"--input {argument}: no file matches", "correct the pattern (try it with ls)")
            )
    for path in map(Path, matches):
        if path.is_dir():
            yield from ((file, path) for file in _files_below(path, input_format, problems, log))
        else:
            yield path, None


def _files_below(
    folder: Path, input_format: InputFormat, problems: list[Problem], log: Callable[[str], None]
) -> list[Path]:
    """Return the files of a folder and its subfolders that are read, sorted; log the number of the others."""

    def unreadable(error: OSError) -> None:
        problems.append(Problem(f"{error.filename}: cannot be read: {error.strerror}", _GIVE_FILES))

    files: list[Path] = []
    others: Counter[str] = Counter()
    for parent, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(parent, name) for name in names if not name.startswith(".")):
            if input_format == "text" or _suffixes(path)[0] in _CONTENTS:
                files.append(path)
            else:
                others[path.suffix or "no suffix"] += 1
    suffixes = ", ".join(f".{suffix}" for suffix in _CONTENTS)
    if not files:
        found = f"only {_counted(others)}" if others else "is empty"
        problems.append(
            Problem(
                f"{folder}: is a folder without a file of {suffixes} (or .gz, .bz2, .zst of these): {found}",
                "give --input a folder with such files, quoted globs, or --input-format text to read all files as text",
            )
        )
    elif others:
        log(f"{folder}: not read: {_counted(others)}; only {suffixes}; --input-format text reads all files")
    return sorted(files)


def _counted(suffixes: Counter[str]) -> str:
    """Return the number of files by suffix."""
    shown = [f"{count:,} of {suffix}" for suffix, count in suffixes.most_common(5)]
    rest = suffixes.total() - sum(count for _, count in suffixes.most_common(5))
    plural = "s" * (suffixes.total() != 1)
    return f"{suffixes.total():,} file{plural} ({', '.join(shown)}{f', {rest:,} others' if rest else ''})"


def _check(path: Path, folder: Path | None, input_format: InputFormat) -> InputFile | Problem:
    try:
        status = path.stat()
        kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would block until a writer opens it
            kind = kinds.get(stat.S_IFMT(status.st_mode), "a device")
            return Problem(f"{path}: is {kind}, not a file", _GIVE_FILES)
        with path.open("rb") as file:
            start = file.read(_START_BYTES)
    except FileNotFoundError:
        return _missing(path)
    except OSError as error:
        return Problem(f"{path}: cannot be read: {error.strerror}", _GIVE_FILES)
    suffix, compression = _suffixes(path)
    content = _CONTENTS.get(suffix, "jsonl")
    if input_format != "auto" and content != "parquet":
        content = input_format
    return (
        _mismatch(path, "parquet" if content == "parquet" else compression, start)
        or _other_content(
            path, content, input_format, "" if compression else start.decode("utf-8-sig", "replace")
        )
        or InputFile(path, content, compression, status.st_size, status.st_mtime_ns, folder)
    )


_START_BYTES: Final = 512
"""Bytes of a file that are compared with its suffix."""


def has_text_suffix(name: str) -> bool:
    """Return whether the suffix of a name says that it is text, which a folder would be searched for."""
    return _suffixes(Path(name))[0] in _CONTENTS


def _missing(path: Path) -> Problem:
    if path.is_symlink():
        return Problem(f"{path}: is a broken link to {path.readlink()}", _GIVE_FILES)
    if re.match(r"[a-z0-9]+:/", str(path)):  # Path has merged the slashes
        return Problem(
            f"{path}: object stores are not read",
            "copy the files to a file system, or mount the bucket as a folder",
        )
    names = [entry.name for entry in path.parent.glob("*")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=3)
    fix = "give --input the path of an existing file" + (
        f": {path.parent} contains {', '.join(near)}" if near else ""
    )
    return Problem(f"{path}: there is no such file", fix)


def _suffixes(path: Path) -> tuple[str, str]:
    """Return the suffixes of content and compression, without dots, in lower case."""
    compression = path.suffix.lower().removeprefix(".")
    if compression not in _COMPRESSIONS:
        return compression, ""
    return path.with_suffix("").suffix.lower().removeprefix("."), compression


def _mismatch(path: Path, kind: str, start: bytes) -> Problem | None:
    """Return the problem if the first bytes of a file do not match its suffix; `kind` is empty for uncompressed text."""
    actual = next((other for other, magic in _MAGIC.items() if start.startswith(magic)), "")
    if actual == kind or (kind == "zst" and start[1:4] == _SKIPPABLE_ZST):
        return None
    if not kind:
        return Problem(
            f"{path}: contains {actual} data, but has no .{actual} suffix", f"rename it to {path}.{actual}"
        )
    if not start:
        return Problem(f"{path}: is empty, which no .{kind} file can be", "leave it out, or make it again")
    content = f"contains {actual} data" if actual else f"begins with {start[:4]!r}"
    return Problem(
        f"{path}: is not a .{kind} file: it {content}",
        "rename it after its content, or copy or make it again",
    )


def _other_content(path: Path, content: Content, input_format: InputFormat, start: str) -> Problem | None:
    """Return the problem if the beginning of an uncompressed file shows that it is not what its suffix says."""
    if content == "jsonl" and _suffixes(path)[0] not in _LINES and re.match(r"\s*\[\s*\{", start):
        return Problem(
            f"{path}: is a JSON array; JSON Lines (an object per line), plain text and Parquet are read",
            f"convert it: jq -c '.[]' {path} > {path.with_suffix('.jsonl')}",
        )
    if content == "text" and input_format == "auto" and re.match(r'\s*\{\s*"[^"\n]*"\s*:', start):
        return Problem(
            f"{path}: has the suffix of a text file, but begins with a JSON object",
            "choose how it is read: --input-format jsonl or --input-format text",
        )
    return None
