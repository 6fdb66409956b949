"""Files of chunks in the safetensors format, written and read one chunk at a time.

    8 bytes   length of the header, little-endian
    header    JSON: {key: {"dtype", "shape", "data_offsets": [start, stop]}}, padded with spaces
    data      row-major values, one chunk after the other

The safetensors library writes a file from memory at once, and reads with mmap, where truncation of the file kills the
process. Here memory is bounded by one chunk, and every failure is an exception.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from megatrain.checkpoint.disk import Disk, errors_name_file, open_regular_file, read_into
from megatrain.checkpoint.errors import DamagedError
from megatrain.checkpoint.manifest import DTYPES, StoredFile

_MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class WrittenFile:
    """A written file: its manifest entry, and the crc32 of each chunk."""

    file: StoredFile
    crc32s: list[int]


def dtype_name(dtype: torch.dtype) -> str:
    return _DTYPE_NAMES[dtype]


def write_tensor_file(disk: Disk, path: Path, chunks: Sequence[tuple[str, Tensor]]) -> WrittenFile:
    """Write (key, tensor) chunks and fsync the data (not the file name); one chunk at a time is copied to the CPU."""
    header = _header(chunks)
    num_bytes, sums = len(header), []
    with errors_name_file(path), disk.create(path) as file:
        disk.write(file, header)
        for _, tensor in chunks:
            data = _bytes_of(tensor.detach().cpu().contiguous())
            sums.append(zlib.crc32(data))
            disk.write(file, data)
            num_bytes += len(data)
        disk.sync(file)
    return WrittenFile(StoredFile(num_bytes, zlib.crc32(header)), sums)


class TensorFile:
    """An open file of chunks. The header is checked on opening, each chunk when it is read."""

    def __init__(self, path: Path, stored: StoredFile) -> None:
        self.path = path
        self._file = open_regular_file(path)
        try:
            check_size(path, os.fstat(self._file.fileno()).st_size, stored)
            self._header, self._data_start = self._read_header(stored)
            self._data_bytes = stored.num_bytes - self._data_start
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def read(self, key: str, *, dtype: str, shape: tuple[int, ...], crc32: int) -> Tensor:
        """Return the chunk under `key`.

        Raises:
            DamagedError: it differs from its entry in the manifest.
        """
        entry = self._header.get(key)
        if entry is None:
            raise DamagedError(f"{self.path}: has no {key}")
        size = math.prod(shape) * DTYPES[dtype].itemsize
        try:
            start, stop = entry["data_offsets"]
            is_consistent = entry["dtype"] == dtype and entry["shape"] == list(shape) and stop - start == size
            is_consistent = is_consistent and isinstance(start, int) and 0 <= start <= self._data_bytes - size
        except (KeyError, TypeError, ValueError):
            is_consistent = False
        if not is_consistent:
            raise DamagedError(f"{self.path}: {key} is not {dtype} of shape {shape}")
        tensor = torch.empty(shape, dtype=DTYPES[dtype])
        data = _bytes_of(tensor)
        read_into(self._file, data, self._data_start + start, self.path)
        if zlib.crc32(data) != crc32:
            raise DamagedError(f"{self.path}: {key} does not match its checksum")
        return tensor

    def _read_header(self, stored: StoredFile) -> tuple[dict[str, Any], int]:
        length = bytearray(8)
        read_into(self._file, memoryview(length), 0, self.path)
        num_bytes = int.from_bytes(length, "little")
        if num_bytes > min(_MAX_HEADER_BYTES, stored.num_bytes):
            raise DamagedError(f"{self.path}: a header of {num_bytes} bytes")
        text = bytearray(num_bytes)
        read_into(self._file, memoryview(text), 8, self.path)
        if zlib.crc32(text, zlib.crc32(length)) != stored.header_crc32:
            raise DamagedError(f"{self.path}: the header does not match its checksum")
        try:
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"{self.path}: the header is not JSON") from error
        if not isinstance(header, dict):
            raise DamagedError(f"{self.path}: the header is not a JSON object")
        return header, 8 + num_bytes


def check_size(path: Path, num_bytes: int, stored: StoredFile) -> None:
    """Raise DamagedError if a file has another size than was written."""
    if num_bytes != stored.num_bytes:
        raise DamagedError(f"{path}: {num_bytes} bytes instead of {stored.num_bytes}")


def _header(chunks: Sequence[tuple[str, Tensor]]) -> bytes:
    entries: dict[str, Any] = {}
    start = 0
    for key, tensor in chunks:
        assert key not in entries, f"two chunks {key}"
        stop = start + tensor.numel() * tensor.element_size()
        entries[key] = {
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
