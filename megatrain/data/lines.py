"""JSON Lines input: from files to texts, with the place of everything that is wrong.

files -> Line(file, number, bytes) -> chunks of about CHUNK_BYTES -> (in a worker) parse -> sentences by key
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

CHUNK_BYTES: Final = 1 << 20
"""Text that a worker gets at once: large against the cost of handing it over, small against memory."""


@dataclass(frozen=True)
class Line:
    """One line of an input file, as it stands there."""

    file: str
    number: int
    """From 1."""
    content: bytes


@dataclass(frozen=True)
class BadLine:
    """A line that is no document, and why."""

    file: str
    number: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.reason}"


def read_lines(files: Iterable[Path]) -> Iterator[Line]:
    """All lines of the files, in order."""
    for path in files:
        with path.open("rb") as file:
            for number, content in enumerate(file, start=1):
                yield Line(str(path), number, content)


def chunks(lines: Iterable[Line], chunk_bytes: int) -> Iterator[list[Line]]:
    """Neighbouring lines, together `chunk_bytes` or the one line that reaches it."""
    chunk: list[Line] = []
    filled = 0
    for line in lines:
        chunk.append(line)
        filled += len(line.content)
        if filled >= chunk_bytes:
            yield chunk
            chunk, filled = [], 0
    if chunk:
        yield chunk


def parse(line: Line, keys: Sequence[str]) -> list[list[str]] | BadLine:
    """The sentences of each key: a string is one sentence, a list of strings are several."""
    try:
        text = line.content.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        byte = line.content[error.start]
        return BadLine(
            line.file, line.number, f"not UTF-8: byte 0x{byte:02x} at position {error.start} of the line"
        )
    if not text.strip():
        return BadLine(line.file, line.number, "blank line")
    if text.startswith("\ufeff"):
        return BadLine(line.file, line.number, "starts with a byte-order mark, which is not JSON")
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        return BadLine(line.file, line.number, f"not JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return BadLine(line.file, line.number, "not usable JSON: nested too deeply")
    except ValueError as error:  # a number of too many digits
        return BadLine(line.file, line.number, f"not usable JSON: {error}")
    if not isinstance(document, dict):
        return BadLine(line.file, line.number, f"holds {_kind(document)}, not an object")
    sentences = []
    for key in keys:
        found = _sentences(document, key)
        if isinstance(found, str):
            return BadLine(line.file, line.number, found)
        sentences.append(found)
    return sentences


def _sentences(document: dict[str, Any], key: str) -> list[str] | str:
    """The sentences of one key, or what is wrong with it."""
    if key not in document:
        present = ", ".join(repr(name) for name in list(document)[:8]) or "nothing"
        return f"key {key!r} is missing; the line has {present}"
    value = document[key]
    sentences = value if isinstance(value, list) else [value]
    for sentence in sentences:
        if not isinstance(sentence, str):
            place = f"a list with {_kind(sentence)}" if isinstance(value, list) else _kind(value)
            return f"key {key!r} holds {place}, not a string or a list of strings"
        if not _is_encodable(sentence):
            return f"key {key!r} holds half of a surrogate pair, which is no character"
    return sentences


def _is_encodable(text: str) -> bool:
    if text.isascii():  # a flag of the string, no walk through it
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: object) -> str:
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), "null")
