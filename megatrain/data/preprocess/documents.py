"""Documents of an input file: chunks of them for workers, and the parsing of one document.

Chunk(file, lines, rows or a text) -> per document: JSON -> object -> sentences of every key, or InvalidDocumentError
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from megatrain.config.errors import is_unicode

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


Unit = Literal["line", "row", "file"]
"""The part of an input file that is a document."""


@dataclass(frozen=True)
class BadLine:
    """A line, row or text file that contains no document, and the reason."""

    file: str
    number: int
    """Number of the line or row in the file, from 1."""
    reason: str
    unit: Unit = "line"
    content: bytes | None = None
    """The line without its line feed; None if it is too long to keep."""
    offset: int = 0
    num_bytes: int = 0
    """Position of the line in the uncompressed file, for lines without content."""
    fix: str = "correct the line"

    def __str__(self) -> str:
        place = {"line": f":{self.number}", "row": f":row {self.number}", "file": ""}
        return f"{self.file}{place[self.unit]}: {self.reason}"


@dataclass(frozen=True)
class Chunk:
    """Consecutive documents of one file."""

    file: str
    first: int
    """Number of the first document, from 1."""
    documents: bytes | list[Row]
    """Whole lines, rows, or the content of a whole file."""
    num_bytes: int
    end: Position
    too_long: BadLine | None = None
    """The skipped line after these documents."""
    unit: Unit = "line"
    is_text: bool = False
    """True if the documents are plain text, not JSON."""

    def split(self) -> Sequence[bytes | Row]:
        """Return the documents one by one, lines without their line feed."""
        if not isinstance(self.documents, bytes):
            return self.documents
        if self.unit == "file":
            return [] if self.too_long else [self.documents]
        lines = self.documents.split(b"\n")
        if not lines[-1]:
            lines.pop()
        return lines


_CHAT_FIX: Final = "add --sft, which reads conversations"


class InvalidDocumentError(Exception):
    """A line or row that contains no document; the message is the reason."""

    def __init__(self, reason: str, *, fix: str = "correct the line") -> None:
        super().__init__(reason)
        self.fix = fix


def texts_of(content: bytes | Row, chunk: Chunk, keys: Sequence[str]) -> list[list[str]]:
    """Return the texts of a document, by key; plain text has one key. Raises InvalidDocumentError."""
    if chunk.is_text:
        assert isinstance(content, bytes)
        return [parse_text(content, chunk.unit)]
    return sentences_of(parse_line(content) if isinstance(content, bytes) else content, keys)


def parse_text(content: bytes, unit: Unit) -> list[str]:
    """Return the text of a plain line or file, unchanged, as a list of one; blank text has no tokens: an empty list."""
    text = _decoded(content.removeprefix(codecs.BOM_UTF8), unit)
    if unit == "line":
        text = text.removesuffix("\r")
    return [text] if text and not text.isspace() else []


def _decoded(content: bytes, unit: Unit) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        where = f"line {line}, position" if unit == "file" else "position"
        raise InvalidDocumentError(
            f"not UTF-8: byte 0x{content[error.start]:02x} at {where} {error.start} of the {unit}",
            fix=f"correct the {unit}",
        ) from None


def parse_line(line: bytes) -> Row:
    """Parse a line, without a byte-order mark. If a key occurs twice, its last value counts, as usual in JSON."""
    text = _decoded(line.removeprefix(codecs.BOM_UTF8), "line")
    if not text or text.isspace():
        raise InvalidDocumentError("blank line")
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidDocumentError(
            f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        ) from None
    except RecursionError:
        raise InvalidDocumentError("not usable JSON: nested too deeply") from None
    except ValueError as error:  # a number of too many digits
        raise InvalidDocumentError(f"not usable JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidDocumentError(f"is {kind_of(document)}, not an object")
    return document


def without_null(value: Any) -> Any:
    """Return a value of a table without the keys whose value is null: a table cannot leave them out."""
    if isinstance(value, dict):
        return {key: without_null(one) for key, one in value.items() if one is not None}
    return [without_null(one) for one in value] if isinstance(value, list) else value


def sentences_of(document: Row, keys: Sequence[str]) -> list[list[str]]:
    """Return the sentences of each key: a string is one sentence, a list of strings several."""
    return [_sentences(document, key) for key in keys]


def _sentences(document: Row, key: str) -> list[str]:
    try:
        value = document[key]
    except KeyError:
        present = ", ".join(repr(name) for name in list(document)[:8]) or "nothing"
        texts = [
            name
            for name, text in document.items()
            if isinstance(text, str | list) and not is_list_of_objects(text)
        ]
        fixes = [_CHAT_FIX] if any(map(is_list_of_objects, document.values())) else []
        fixes += [f"name the key of the text with --json-keys ({' or '.join(texts[:8])})"] if texts else []
        raise InvalidDocumentError(
            f"key {key!r} is missing; the keys are {present}",
            fix=", or ".join([*fixes, "correct the line"]),
        ) from None
    sentences = value if isinstance(value, list) else [value]
    for sentence in sentences:
        if not isinstance(sentence, str):
            kind = f"a list with {kind_of(sentence)}" if isinstance(value, list) else kind_of(value)
            raise InvalidDocumentError(
                f"key {key!r} is {kind}, not a string or a list of strings",
                fix=f"{_CHAT_FIX}, or correct the line" if is_list_of_objects(value) else "correct the line",
            )
        if not is_unicode(sentence):
            raise InvalidDocumentError(
                f"key {key!r} contains half of a surrogate pair, which is not a character"
            )
    return sentences


def is_list_of_objects(value: object) -> bool:
    """Return whether a value may be the messages of a conversation."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def kind_of(value: object) -> str:
    """Return the JSON type of a value, in words."""
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), "null")
