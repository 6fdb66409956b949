"""Documents of an input file: chunks of them for workers, and the parsing of one document.

Chunk(file, lines or rows) -> per document: JSON -> object -> sentences of every key, or InvalidDocumentError(reason)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

CHUNK_BYTES: Final = 1 << 20
"""Bytes of text per chunk: large enough to hide the cost of sending it to a worker, small compared to memory."""

Row = dict[str, Any]
"""A row of a table: values by column."""


@dataclass(frozen=True)
class Position:
    """A boundary between documents of the input, at which a run can resume."""

    file: int = 0
    """Index of the input file."""
    document: int = 0
    """Lines or rows of that file before the position."""
    offset: int = 0
    """Uncompressed bytes of that file before the position; unused for tables."""
    bytes_read: int = 0
    """Bytes of all input files on disk before the position, for the progress estimate."""


@dataclass(frozen=True)
class BadLine:
    """A line or row that contains no document, and the reason."""

    file: str
    number: int
    """Number of the line or row in the file, from 1."""
    reason: str
    is_row: bool = False
    content: bytes | None = None
    """The line without its line feed; None if it is too long to keep."""
    offset: int = 0
    num_bytes: int = 0
    """Position of the line in the uncompressed file, for lines without content."""
    fix: str = "correct the line"

    def __str__(self) -> str:
        return f"{self.file}:{'row ' * self.is_row}{self.number}: {self.reason}"


@dataclass(frozen=True)
class Chunk:
    """Consecutive documents of one file."""

    file: str
    first: int
    """Number of the first document, from 1."""
    documents: bytes | list[Row]
    """Whole lines, or rows."""
    num_bytes: int
    end: Position
    too_long: BadLine | None = None
    """The skipped line after these documents."""

    @property
    def is_rows(self) -> bool:
        """True if the documents are rows of a table."""
        return not isinstance(self.documents, bytes)

    def split(self) -> Sequence[bytes | Row]:
        """Return the documents one by one, lines without their line feed."""
        if not isinstance(self.documents, bytes):
            return self.documents
        lines = self.documents.split(b"\n")
        if not lines[-1]:
            lines.pop()
        return lines


class InvalidDocumentError(Exception):
    """A line or row that contains no document; the message is the reason."""

    def __init__(self, reason: str, *, fix: str = "correct the line") -> None:
        super().__init__(reason)
        self.fix = fix


def parse_line(line: bytes) -> Row:
    """Parse a line. If a key occurs twice, its last value counts, as usual in JSON."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise InvalidDocumentError(
            f"not UTF-8: byte 0x{line[error.start]:02x} at position {error.start} of the line"
        ) from None
    if not text or text.isspace():
        raise InvalidDocumentError("blank line")
    if text.startswith("\ufeff"):
        raise InvalidDocumentError("starts with a byte-order mark, which is not valid JSON")
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidDocumentError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise InvalidDocumentError("not usable JSON: nested too deeply") from None
    except ValueError as error:  # a number of too many digits
        raise InvalidDocumentError(f"not usable JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidDocumentError(f"is {_kind(document)}, not an object")
    return document


def sentences_of(document: Row, keys: Sequence[str]) -> list[list[str]]:
    """Return the sentences of each key: a string is one sentence, a list of strings several."""
    return [_sentences(document, key) for key in keys]


def _sentences(document: Row, key: str) -> list[str]:
    try:
        value = document[key]
    except KeyError:
        present = ", ".join(repr(name) for name in list(document)[:8]) or "nothing"
        texts = [name for name, text in document.items() if isinstance(text, str | list)][:8]
        raise InvalidDocumentError(
            f"key {key!r} is missing; the keys are {present}",
            fix=f"name the key of the text with --json-keys ({' or '.join(texts)}), or correct the line"
            if texts
            else "correct the line",
        ) from None
    sentences = value if isinstance(value, list) else [value]
    for sentence in sentences:
        if not isinstance(sentence, str):
            kind = f"a list with {_kind(sentence)}" if isinstance(value, list) else _kind(value)
            raise InvalidDocumentError(f"key {key!r} is {kind}, not a string or a list of strings")
        if not _is_encodable(sentence):
            raise InvalidDocumentError(
                f"key {key!r} contains half of a surrogate pair, which is not a character"
            )
    return sentences


def _is_encodable(text: str) -> bool:
    if text.isascii():  # O(1)
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
