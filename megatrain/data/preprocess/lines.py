"""Documents of one input file on their way to a worker, and what a worker takes from each.

Chunk(file, lines or rows) -> per document: JSON -> object -> sentences of every key      or UnusableError(reason)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

CHUNK_BYTES: Final = 1 << 20
"""Text that a worker gets at once: large against the cost of handing it over, small against memory."""

Row = dict[str, Any]
"""A document of a table: values by column."""


@dataclass(frozen=True)
class Position:
    """A border between documents of the input, to go on from."""

    file: int = 0
    """Which one, from 0."""
    document: int = 0
    """Lines or rows of that file before it."""
    offset: int = 0
    """Bytes before it, once uncompressed. Unused where rows are counted."""
    bytes_read: int = 0
    """Of all input files, as they lie on the disk: for the time that is left."""


@dataclass(frozen=True)
class BadLine:
    """A line or a row that is no document, and why."""

    file: str
    number: int
    """From 1."""
    reason: str
    is_row: bool = False
    content: bytes | None = None
    """The line without its line feed; None if it is too long to be held."""
    offset: int = 0
    num_bytes: int = 0
    """Where the line lies in the uncompressed file, for those without content."""

    def __str__(self) -> str:
        return f"{self.file}:{'row ' * self.is_row}{self.number}: {self.reason}"


@dataclass(frozen=True)
class Chunk:
    """Neighbouring documents of one file."""

    file: str
    first: int
    """Number of the first one, from 1."""
    documents: bytes | list[Row]
    """Whole lines, or rows."""
    num_bytes: int
    end: Position
    too_long: BadLine | None = None
    """The line behind these, which was left unread."""

    @property
    def is_rows(self) -> bool:
        """Whether the documents come from a table."""
        return not isinstance(self.documents, bytes)

    def split(self) -> Sequence[bytes | Row]:
        """The documents one by one, lines without their line feed."""
        if not isinstance(self.documents, bytes):
            return self.documents
        lines = self.documents.split(b"\n")
        if not lines[-1]:
            lines.pop()
        return lines


class UnusableError(Exception):
    """A document that none can be made of; says why."""


def parse_line(line: bytes) -> Row:
    """The object that a line holds. Of keys that are there twice the last one counts, as usual in JSON."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise UnusableError(
            f"not UTF-8: byte 0x{line[error.start]:02x} at position {error.start} of the line"
        ) from None
    if not text or text.isspace():
        raise UnusableError("blank line")
    if text.startswith("\ufeff"):
        raise UnusableError("starts with a byte-order mark, which is not JSON")
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise UnusableError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise UnusableError("not usable JSON: nested too deeply") from None
    except ValueError as error:  # a number of too many digits
        raise UnusableError(f"not usable JSON: {error}") from None
    if not isinstance(document, dict):
        raise UnusableError(f"holds {_kind(document)}, not an object")
    return document


def sentences_of(document: Row, keys: Sequence[str]) -> list[list[str]]:
    """The sentences of each key: a string is one sentence, a list of strings are several."""
    return [_sentences(document, key) for key in keys]


def _sentences(document: Row, key: str) -> list[str]:
    try:
        value = document[key]
    except KeyError:
        present = ", ".join(repr(name) for name in list(document)[:8]) or "nothing"
        raise UnusableError(f"key {key!r} is missing; the line has {present}") from None
    sentences = value if isinstance(value, list) else [value]
    for sentence in sentences:
        if not isinstance(sentence, str):
            place = f"a list with {_kind(sentence)}" if isinstance(value, list) else _kind(value)
            raise UnusableError(f"key {key!r} holds {place}, not a string or a list of strings")
        if not _is_encodable(sentence):
            raise UnusableError(f"key {key!r} holds half of a surrogate pair, which is no character")
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
