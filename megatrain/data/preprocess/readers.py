"""Read input files in chunks of documents, starting at any boundary between documents.

    JSON Lines, text -> blocks of bytes -> whole lines, or the whole file -.
    Parquet          -> batches of rows ------------------------------------+-> Chunk(file, first, documents, end)

At most one chunk and its longest line are in memory; a line above the limit is skipped without reading it into memory.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, Final, Literal

from megatrain.config.errors import ConfigError, InputError, Problem
from megatrain.data.files import optional_package
from megatrain.data.preprocess.documents import CHUNK_BYTES, BadLine, Chunk, Position, Row
from megatrain.data.preprocess.inputs import InputFile


@dataclass(frozen=True, kw_only=True)
class ChunkReader:
    """Reads the input files one after the other."""

    files: Sequence[InputFile]
    json_keys: Sequence[str]
    max_line_bytes: int
    chunk_bytes: int = CHUNK_BYTES
    text_documents: Literal["file", "line"] = "file"
    """The part of a text file that is a document."""
    row_keys: Sequence[str] = ()
    """Keys that are read in addition to the messages of a conversation; empty: documents are texts."""

    def require_readable(self) -> None:
        """Raise ConfigError with all missing packages and columns."""
        problems: dict[Problem, None] = {}
        for file in self.files:
            try:
                if file.compression == "zst":
                    _zstandard()
                if file.content == "parquet":
                    (require_messages if self.row_keys else require_texts)(file, self.json_keys)
            except ConfigError as error:
                problems |= dict.fromkeys(error.problems)
        if problems:
            raise ConfigError.of(list(problems))

    def chunks(self, start: Position) -> Iterator[Chunk]:
        """Yield all documents from a position on. Raises InputError if a file is damaged or has changed."""
        position, before = start, 0
        for number, file in enumerate(self.files):
            if number >= start.file:
                if number > start.file:
                    position = Position(file=number, bytes_read=before)
                for chunk in self._reader_of(file)(file, position, before):
                    position = chunk.end
                    yield chunk
            before += file.num_bytes

    def _reader_of(self, file: InputFile) -> Callable[[InputFile, Position, int], Iterator[Chunk]]:
        if file.content == "parquet":
            return self._rows
        return self._text if file.content == "text" and self.text_documents == "file" else self._lines

    def _lines(self, file: InputFile, position: Position, bytes_before: int) -> Iterator[Chunk]:
        with file.path.open("rb", buffering=0) as raw:
            content = _checked(
                file,
                _read_uncompressed(file, raw, position.offset, min(self.chunk_bytes, _BLOCK_BYTES)),
                is_start=not position.offset,
            )
            blocks = whole_lines(content, chunk_bytes=self.chunk_bytes, max_line_bytes=self.max_line_bytes)
            try:
                for block in blocks:
                    first = position.document + 1
                    end, too_long = self._after(file, position, block)
                    position = replace(end, bytes_read=bytes_before + raw.tell())
                    yield Chunk(
                        str(file.path),
                        first,
                        block.lines,
                        len(block.lines),
                        position,
                        too_long,
                        is_text=file.content == "text",
                    )
            except _READ_ERRORS as error:
                raise _read_error(file, f" after line {position.document}", error) from error

    def _text(self, file: InputFile, position: Position, bytes_before: int) -> Iterator[Chunk]:
        """Yield a text file as one document."""
        if position.document:
            return
        held, num_bytes = bytearray(), 0
        try:
            with file.path.open("rb", buffering=0) as raw:
                for block in _checked(file, _read_uncompressed(file, raw, 0, _BLOCK_BYTES), is_start=True):
                    num_bytes += len(block)
                    if num_bytes <= self.max_line_bytes:
                        held += block
        except _READ_ERRORS as error:
            raise _read_error(file, "", error) from error
        end = replace(position, document=1, offset=num_bytes, bytes_read=bytes_before + file.num_bytes)
        too_long = None
        if num_bytes > self.max_line_bytes:
            held.clear()
            too_long = BadLine(
                str(file.path),
                1,
                f"longer than --max-line-mb {self.max_line_bytes / 1e6:g}: {num_bytes} bytes",
                "file",
                num_bytes=num_bytes,
                fix="raise --max-line-mb, divide the file, or read its lines with --text-documents line",
            )
        yield Chunk(str(file.path), 1, bytes(held), len(held), end, too_long, unit="file", is_text=True)

    def _after(
        self, file: InputFile, position: Position, block: LineBlock
    ) -> tuple[Position, BadLine | None]:
        """Return the position after a block, and the too long line at its end, if any."""
        content = block.lines
        num_lines = content.count(b"\n") + (bool(content) and not content.endswith(b"\n"))
        end = replace(position, document=position.document + num_lines, offset=position.offset + len(content))
        if not block.too_long_bytes:
            return end, None
        bad = BadLine(
            str(file.path),
            end.document + 1,
            f"longer than --max-line-mb {self.max_line_bytes / 1e6:g}: {block.too_long_bytes} bytes",
            offset=end.offset,
            num_bytes=block.too_long_bytes,
        )
        after = replace(end, document=end.document + 1, offset=end.offset + block.too_long_bytes)
        return after, bad

    def _rows(self, file: InputFile, position: Position, bytes_before: int) -> Iterator[Chunk]:
        columns = [*self.json_keys, *self.row_keys]
        for rows in read_rows(file, columns, start=position.document, batch_bytes=self.chunk_bytes):
            first = position.document + 1
            position = replace(
                position,
                document=position.document + len(rows.values),
                bytes_read=bytes_before + int(file.num_bytes * rows.share_read),
            )
            yield Chunk(str(file.path), first, rows.values, rows.num_bytes, position, unit="row")


@dataclass(frozen=True)
class LineBlock:
    """Whole lines, optionally followed by a line that was skipped because it is too long."""

    lines: bytes
    too_long_bytes: int = 0
    """Bytes of the skipped line with its line feed, or 0."""


def whole_lines(blocks: Iterable[bytes], *, chunk_bytes: int, max_line_bytes: int) -> Iterator[LineBlock]:
    """Group a stream of bytes into whole lines of at least `chunk_bytes` per block.

    An error of the stream is raised after all whole lines before it were yielded. No block of the stream may be larger
    than `max_line_bytes`.
    """
    held = bytearray()  # whole lines, then the beginning of a line without its end
    num_whole_bytes = begun_bytes = 0
    failure: Exception | None = None
    for block in _until_failure(blocks):
        if isinstance(block, Exception):
            failure = block
            break
        first, last = block.find(b"\n") + 1, block.rfind(b"\n") + 1  # 0: no line feed in this block
        begun_bytes += first or len(block)
        held += block[: first or len(block)]
        is_too_long = begun_bytes - bool(first) > max_line_bytes
        if is_too_long:
            del held[num_whole_bytes:]
        if not first:
            continue
        if is_too_long:
            yield LineBlock(_pop_bytes(held, num_whole_bytes), begun_bytes)
        held += block[first:last]
        num_whole_bytes = len(held)
        held += block[last:]
        begun_bytes = len(block) - last
        if num_whole_bytes >= chunk_bytes:
            yield LineBlock(_pop_bytes(held, num_whole_bytes))
            num_whole_bytes = 0
    is_too_long = begun_bytes > max_line_bytes
    if failure is not None and not is_too_long:
        del held[num_whole_bytes:]
    if held or is_too_long:
        yield LineBlock(bytes(held), begun_bytes * is_too_long)
    if failure is not None:
        raise failure


_BLOCK_BYTES: Final = 1 << 18
"""Bytes read at once, unless chunks are smaller."""
_COMPRESSED_BYTES: Final = 1 << 14
"""Compressed bytes read at once; their content, which may be much larger, is in memory."""
_ZST_WINDOW_BYTES: Final = 1 << 31
"""The largest window of any .zst file (`zstd --ultra --long=31`); the library's default rejects many files."""
_READ_ERRORS: Final = (EOFError, OSError, zlib.error)


def _read_error(file: InputFile, where: str, error: BaseException) -> InputError:
    """Return the error of a damaged file. Raises InputError if it has changed since the start."""
    file.require_unchanged()
    return InputError(
        f"{file.path}: cannot be read{where}: {error}",
        fix="copy or make the file again: it is truncated or damaged",
    )


def _pop_bytes(held: bytearray, num_bytes: int) -> bytes:
    """Remove and return the first bytes."""
    content = bytes(memoryview(held)[:num_bytes])
    del held[:num_bytes]
    return content


def _until_failure(blocks: Iterable[bytes]) -> Iterator[bytes | Exception]:
    try:
        yield from blocks
    except _READ_ERRORS as error:
        yield error


def _checked(file: InputFile, blocks: Iterable[bytes], *, is_start: bool) -> Iterator[bytes]:
    """Yield the blocks unchanged. Raise InputError for UTF-16, and at the end if the file has changed."""
    for block in blocks:
        # A byte-order mark or an opening brace in UTF-16.
        if is_start and block[:2] in {b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{"}:
            raise InputError(
                f"{file.path}: is UTF-16, not UTF-8", fix="convert it: iconv -f UTF-16 -t UTF-8 IN > OUT"
            )
        is_start = False
        yield block
    file.require_unchanged()


def _read_uncompressed(file: InputFile, raw: Any, offset: int, block_bytes: int) -> Iterator[bytes]:
    """Yield the uncompressed content of a file from `offset` on."""
    if not file.compression:
        raw.seek(offset)
        yield from iter(lambda: raw.read(block_bytes), b"")
        return
    content: Iterator[bytes]
    if file.compression == "gz":
        content = iter(functools.partial(gzip.GzipFile(fileobj=raw).read1, block_bytes), b"")
    else:
        content = _decompressed(
            raw, _zstandard_frame if file.compression == "zst" else bz2.BZ2Decompressor, block_bytes
        )
    for block in content:
        if offset < len(block):
            yield block[offset:]
        offset = max(offset - len(block), 0)


def _decompressed(raw: IO[bytes], new_frame: Callable[[], Any], block_bytes: int) -> Iterator[bytes]:
    """Yield the content of the frames of a compressed file.

    The libraries' own file readers accept some files that are truncated, or damaged between two frames.
    """
    frame = None
    while compressed := raw.read(_COMPRESSED_BYTES):
        while compressed:
            frame = frame or new_frame()
            try:
                content = frame.decompress(compressed)
            except Exception as error:
                raise OSError(str(error)) from error  # each library raises its own
            for start in range(0, len(content), block_bytes):
                yield content[start : start + block_bytes]
            compressed = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the last frame has no end")


def _zstandard() -> Any:
    return optional_package("zstandard", needed_for="reading .zst files")


def _zstandard_frame() -> Any:
    return _zstandard().ZstdDecompressor(max_window_size=_ZST_WINDOW_BYTES).decompressobj()


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a Parquet file."""

    values: list[Row]
    num_bytes: int
    share_read: float
    """Share of the file up to the end of these rows."""


def require_texts(file: InputFile, names: Sequence[str]) -> None:
    """Raise InputError unless the file can be opened and has these text columns."""
    with _open_parquet(file) as table:
        for name in names:
            _require_column(file, table.schema_arrow, name, "strings or lists of strings", _is_text)


def require_messages(file: InputFile, names: Sequence[str]) -> None:
    """Raise InputError unless the file can be opened and the first of these columns that it has is one of messages."""
    with _open_parquet(file) as table:
        schema = table.schema_arrow
        name = next((name for name in names if name in schema.names), names[0])
        _require_column(file, schema, name, "lists of messages", _is_messages)


def _require_column(
    file: InputFile, schema: Any, name: str, wanted: str, is_wanted: Callable[[Any], bool]
) -> None:
    if name not in schema.names:
        raise InputError(
            f"{file.path}: has no column {name!r}, only {', '.join(map(repr, schema.names))}",
            fix="give --json-keys names of its columns",
        )
    if not is_wanted(schema.field(name).type):
        raise InputError(
            f"{file.path}: column {name!r} has type {schema.field(name).type}, not {wanted}",
            fix=f"give --json-keys the name of a column of {wanted}",
        )


def read_rows(file: InputFile, columns: Sequence[str], *, start: int, batch_bytes: int) -> Iterator[Rows]:
    """Yield all rows from index `start` on, in batches of about `batch_bytes`, with those columns that the file has."""
    row = start
    errors = _arrow().ArrowException
    try:
        with _open_parquet(file) as table:
            for batch, end in _row_batches(table, columns, start, batch_bytes):
                row = end
                yield Rows(batch.to_pylist(), batch.nbytes, end / table.metadata.num_rows)
    except (OSError, errors) as error:
        raise _read_error(file, f" after row {row}", error) from error
    file.require_unchanged()


_PARQUET_READ_BYTES: Final = 1 << 20


def _arrow() -> Any:
    return optional_package("pyarrow", needed_for="reading .parquet files")


def _open_parquet(file: InputFile) -> Any:
    parquet = optional_package("pyarrow.parquet", needed_for="reading .parquet files")
    try:
        return parquet.ParquetFile(
            file.path, buffer_size=_PARQUET_READ_BYTES, pre_buffer=False, page_checksum_verification=True
        )
    except (OSError, _arrow().ArrowException) as error:
        raise InputError(
            f"{file.path}: cannot be opened as a Parquet file: {error}", fix="copy or make the file again"
        ) from error


def _row_batches(
    table: Any, columns: Sequence[str], start: int, batch_bytes: int
) -> Iterator[tuple[Any, int]]:
    """Yield batches of rows, each with the number of rows up to its end."""
    end = 0
    for group in range(table.num_row_groups):
        metadata = table.metadata.row_group(group)
        if not metadata.num_rows or end + metadata.num_rows <= start:
            end += metadata.num_rows
            continue
        bytes_per_row = metadata.total_byte_size / metadata.num_rows
        batch_rows = max(int(batch_bytes / max(bytes_per_row, 1)), 1)
        for batch in table.iter_batches(
            batch_size=batch_rows, row_groups=[group], columns=list(columns), use_threads=False
        ):
            end += batch.num_rows
            if end > start:
                yield batch.slice(max(start - (end - batch.num_rows), 0)), end


def _is_messages(kind: Any) -> bool:
    types = _arrow().types
    return bool((types.is_list(kind) or types.is_large_list(kind)) and types.is_struct(kind.value_type))


def _is_text(kind: Any) -> bool:
    types = _arrow().types
    if types.is_list(kind) or types.is_large_list(kind):
        return _is_text(kind.value_type)
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))
