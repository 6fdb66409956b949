"""Write files of chunks in the safetensors format, with a checksum for each block of a chunk.

    8 bytes   length of the header, little-endian
    header    JSON: {key: {"dtype", "shape", "data_offsets": [start, stop]}}, padded with spaces
    data      row-major values, one chunk after the other

The safetensors library writes a file from memory at once; here memory is bounded by one chunk. This module does not import
torch: the writer process of an asynchronous save uses it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatrain.checkpoint.block_checksums import BLOCKS
from megatrain.checkpoint.checked_files import open_regular_file, read_into
from megatrain.checkpoint.errors import CheckpointError
from megatrain.storage.disk import Disk, errors_name_file

T = TypeVar("T")


@dataclass(frozen=True)
class ChunkEntry:
    """A chunk in the header of a file."""

    key: str
    dtype: str
    """Name of the dtype in safetensors."""
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class WrittenFile:
    """A file as it was written."""

    num_bytes: int
    header_crc32: int
    checksums: list[str]
    """For each chunk (or piece), the checksums of its blocks, as `BlockFormat.checksums` returns them."""


def write_shard_file(
    disk: Disk,
    path: Path,
    chunks: Sequence[ChunkEntry],
    data: Iterable[memoryview],
    *,
    verifies: bool = False,
    metadata: Mapping[str, str] | None = None,
) -> WrittenFile:
    """Write a file and fsync its data (not its name); checksums are computed while the disk writes.

    Args:
        data: the bytes of each chunk; of the chunks of exports, which need no checksums, in pieces.
        verifies: read the file again from the disk, and compare it with the checksums.
        metadata: texts for the header.

    Raises:
        OSError: the disk cannot write.
        CheckpointError: the disk returns other data than was written.
    """
    header, found = header_of(chunks, metadata), []
    with errors_name_file(path), disk.create(path) as file, ThreadPoolExecutor(1) as pool:
        disk.write(file, header)
        for values in data:
            checksums = pool.submit(BLOCKS.checksums, values)
            disk.write(file, values)
            found.append(checksums.result())
        disk.sync(file)
    num_bytes = len(header) + sum(chunk.num_bytes for chunk in chunks)
    written = WrittenFile(num_bytes, zlib.crc32(header), found)
    if verifies:
        problem = _problem_on_disk(path, len(header), chunks, written)
        if problem is not None:
            raise CheckpointError(
                f"{path}: {problem} when it is read again (--verify-saves)",
                fix="give --save a folder on other storage, and check the health of this one",
            )
    return written


def one_ahead(produce: Callable[[int], T], count: int) -> Iterator[T]:
    """Yield `produce(0)`, `produce(1)`, ...; a thread produces the next one while one is in use, so that two buffers in turn suffice."""
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(produce, 0)
        for number in range(1, count):
            value, ahead = ahead.result(), pool.submit(produce, number)
            yield value
        yield ahead.result()


def header_of(chunks: Sequence[ChunkEntry], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header of a file of these chunks, with its length."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    start = 0
    for chunk in chunks:
        assert chunk.key not in entries, f"two chunks {chunk.key}"
        stop = start + chunk.num_bytes
        entries[chunk.key] = {"dtype": chunk.dtype, "shape": chunk.shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _problem_on_disk(
    path: Path, header_bytes: int, chunks: Sequence[ChunkEntry], written: WrittenFile
) -> str | None:
    """Read a file after its pages are dropped from the page cache; return what differs from what was written, or None."""
    buffer = memoryview(bytearray(max(header_bytes, *(chunk.num_bytes for chunk in chunks))))
    with open_regular_file(path) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        read_into(file, buffer[:header_bytes], 0, path)
        if zlib.crc32(buffer[:header_bytes]) != written.header_crc32:
            return "the header differs from what was written"
        at = header_bytes
        for chunk, checksums in zip(chunks, written.checksums, strict=True):
            data = buffer[: chunk.num_bytes]
            read_into(file, data, at, path)
            if BLOCKS.checksums(data) != checksums:
                return f"{chunk.key} differs from what was written"
            at += chunk.num_bytes
    return None
