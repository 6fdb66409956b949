"""From input files to chunks of documents, from any border between documents on.

    .jsonl, .gz, .bz2, .zst -> pieces of bytes -> blocks of whole lines -.
    .parquet                -> batches of rows --------------------------+-> Chunk(file, first, documents, end)

Nothing larger than a chunk and its longest line is ever held; a line above the limit is passed over, not read in.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, Final

from megatrain.config.errors import ConfigError, InputError, Problem
from megatrain.data.files import optional_package
from megatrain.data.preprocess.inputs import InputFile
from megatrain.data.preprocess.lines import CHUNK_BYTES, BadLine, Chunk, Position
from megatrain.data.preprocess.parquet import read_rows, require_columns


@dataclass(frozen=True, kw_only=True)
class ChunkReader:
    """Reads the files one after the other."""

    files: Sequence[InputFile]
    json_keys: Sequence[str]
    max_line_bytes: int
    chunk_bytes: int = CHUNK_BYTES

    def require_readable(self) -> None:
        """Raises ConfigError with what is missing to read the files: packages, columns."""
        problems: dict[Problem, None] = {}
        for file in self.files:
            try:
                if file.kind == "zst":
                    _zstandard()
                if file.kind == "parquet":
                    require_columns(file, self.json_keys)
            except ConfigError as error:
                problems |= dict.fromkeys(error.problems)
        if problems:
            raise ConfigError.of(list(problems))

    def chunks(self, start: Position) -> Iterator[Chunk]:
        """All documents from a position on. Raises InputError where a file is damaged or has changed."""
        position = start
        for number, file in enumerate(self.files):
            if number < position.file:
                continue
            before = sum(other.num_bytes for other in self.files[:number])
            if number > position.file:
                position = Position(file=number, bytes_read=before)
            read = self._rows if file.kind == "parquet" else self._lines
            for chunk in read(file, position, before):
                position = chunk.end
                yield chunk

    def _lines(self, file: InputFile, position: Position, bytes_before: int) -> Iterator[Chunk]:
        with file.path.open("rb", buffering=0) as raw:
            pieces = _checked(
                file,
                _pieces(file, raw, position.offset, min(self.chunk_bytes, _PIECE_BYTES)),
                is_start=not position.offset,
            )
            blocks = whole_lines(pieces, chunk_bytes=self.chunk_bytes, max_line_bytes=self.max_line_bytes)
            try:
                for block in blocks:
                    first = position.document + 1
                    end, too_long = self._after(file, position, block)
                    position = replace(end, bytes_read=bytes_before + raw.tell())
                    yield Chunk(str(file.path), first, block.lines, len(block.lines), position, too_long)
            except _READ_ERRORS as error:
                file.require_unchanged()
                raise InputError(
                    f"{file.path}: cannot be read any further after line {position.document}: {error}",
                    fix="the file is cut short or damaged: copy or make it again",
                ) from error

    def _after(
        self, file: InputFile, position: Position, block: LineBlock
    ) -> tuple[Position, BadLine | None]:
        """The position behind a block, and the line at its end that is too long, if there is one."""
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
        behind = replace(end, document=end.document + 1, offset=end.offset + block.too_long_bytes)
        return behind, bad

    def _rows(self, file: InputFile, position: Position, bytes_before: int) -> Iterator[Chunk]:
        for rows in read_rows(file, self.json_keys, start=position.document, batch_bytes=self.chunk_bytes):
            first = position.document + 1
            position = replace(
                position,
                document=position.document + len(rows.values),
                bytes_read=bytes_before + int(file.num_bytes * rows.share_read),
            )
            yield Chunk(str(file.path), first, rows.values, rows.num_bytes, position)


@dataclass(frozen=True)
class LineBlock:
    """Whole lines, then perhaps one that was passed over because it is too long."""

    lines: bytes
    too_long_bytes: int = 0
    """Bytes of that line with its line feed, or 0."""


def whole_lines(pieces: Iterable[bytes], *, chunk_bytes: int, max_line_bytes: int) -> Iterator[LineBlock]:
    """Cut a stream of bytes between lines, every `chunk_bytes` or as soon as a line ends after them.

    An error of the stream is raised once all whole lines before it are out. No piece is above `max_line_bytes`.
    """
    held = bytearray()  # whole lines, then what there is of one that has not ended yet
    num_whole_bytes = begun_bytes = 0
    failure: Exception | None = None
    for piece in _until_failure(pieces):
        if isinstance(piece, Exception):
            failure = piece
            break
        first, last = piece.find(b"\n") + 1, piece.rfind(b"\n") + 1  # 0: no line ends in this piece
        begun_bytes += first or len(piece)
        held += piece[: first or len(piece)]
        is_too_long = begun_bytes - bool(first) > max_line_bytes
        if is_too_long:
            del held[num_whole_bytes:]
        if not first:
            continue
        if is_too_long:
            yield LineBlock(_taken(held, num_whole_bytes), begun_bytes)
        held += piece[first:last]
        num_whole_bytes = len(held)
        held += piece[last:]
        begun_bytes = len(piece) - last
        if num_whole_bytes >= chunk_bytes:
            yield LineBlock(_taken(held, num_whole_bytes))
            num_whole_bytes = 0
    is_too_long = begun_bytes > max_line_bytes
    if failure is not None and not is_too_long:
        del held[num_whole_bytes:]
    if held or is_too_long:
        yield LineBlock(bytes(held), begun_bytes * is_too_long)
    if failure is not None:
        raise failure


_PIECE_BYTES: Final = 1 << 18
"""Read at once, if chunks are not smaller."""
_PACKED_BYTES: Final = 1 << 14
"""Compressed bytes at once: what comes out of them is held, and may be many times more."""
_ZST_WINDOW_BYTES: Final = 1 << 31
"""The largest that any .zst file needs (`zstd --ultra --long=31`); by default the library refuses many."""
_READ_ERRORS: Final = (EOFError, OSError, zlib.error)


def _taken(held: bytearray, num_bytes: int) -> bytes:
    """The first bytes, which do not stay behind."""
    content = bytes(memoryview(held)[:num_bytes])
    del held[:num_bytes]
    return content


def _until_failure(pieces: Iterable[bytes]) -> Iterator[bytes | Exception]:
    try:
        yield from pieces
    except _READ_ERRORS as error:
        yield error


def _checked(file: InputFile, pieces: Iterable[bytes], *, is_start: bool) -> Iterator[bytes]:
    """The pieces, of a file that is text in the right encoding and stays what it is until its end."""
    for piece in pieces:
        if is_start and piece[:2] in {b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{"}:  # its mark, or a brace in it
            raise InputError(
                f"{file.path}: is UTF-16, not UTF-8", fix="convert it: iconv -f UTF-16 -t UTF-8 IN > OUT"
            )
        is_start = False
        yield piece
    file.require_unchanged()


def _pieces(file: InputFile, raw: Any, offset: int, piece_bytes: int) -> Iterator[bytes]:
    """What a file holds behind `offset`, uncompressed."""
    if file.kind == "plain":
        raw.seek(offset)
        yield from iter(lambda: raw.read(piece_bytes), b"")
        return
    content: Iterator[bytes]
    if file.kind == "gz":
        content = iter(functools.partial(gzip.GzipFile(fileobj=raw).read1, piece_bytes), b"")
    else:
        content = _unpacked(raw, _zstandard_frame if file.kind == "zst" else bz2.BZ2Decompressor, piece_bytes)
    for piece in content:
        if offset < len(piece):
            yield piece[offset:]
        offset = max(offset - len(piece), 0)


def _unpacked(raw: IO[bytes], new_frame: Callable[[], Any], piece_bytes: int) -> Iterator[bytes]:
    """What the frames of a file hold, one after the other.

    The libraries' own readers of files take some that are cut short, or damaged between two frames, for whole.
    """
    frame = None
    while packed := raw.read(_PACKED_BYTES):
        while packed:
            frame = frame or new_frame()
            try:
                content = frame.decompress(packed)
            except Exception as error:
                raise OSError(str(error)) from error  # each library raises its own
            for start in range(0, len(content), piece_bytes):
                yield content[start : start + piece_bytes]
            packed = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("its last part has no end")


def _zstandard() -> Any:
    return optional_package("zstandard", needed_for="reading .zst files")


def _zstandard_frame() -> Any:
    return _zstandard().ZstdDecompressor(max_window_size=_ZST_WINDOW_BYTES).decompressobj()
