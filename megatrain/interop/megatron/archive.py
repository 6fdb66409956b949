"""Archives of torch.save: zip files with data.pkl and the raw storages data/0, data/1, ...; whole files, or ranges of a file.

The files are untrusted: no class is built and no code runs, and sizes are compared before memory is allocated.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Self

import torch
from torch import Tensor

from megatrain.checkpoint.checked_files import open_regular_file
from megatrain.checkpoint.errors import DamagedError, DamagedImportError
from megatrain.interop.megatron.inert_pickle import Record, path_of, read_pickle

_MAX_BYTES: Final = 1 << 34
_BLOCK_BYTES: Final = 16 << 20
_MAX_COUNT: Final = 1 << 50
MAX_DIMENSIONS: Final = 8
NOT_AS_EXPECTED: Final = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)
"""Errors that values raise which are of another type or number than expected."""
_STORAGES: Final = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.HalfStorage": torch.float16,
}


@dataclass(frozen=True)
class Place:
    """Bytes of a file that hold one archive."""

    file: str
    start: int
    num_bytes: int


class Archive:
    """A torch.save archive inside a file, as a context manager."""

    def __init__(self, path: Path, place: Place, *, max_bytes: int = _MAX_BYTES) -> None:
        self.path, self.place, self._max_bytes = path, place, max_bytes
        self.where = f"{path}: bytes {place.start} to {place.start + place.num_bytes}"

    def __enter__(self) -> Self:
        if self.place.num_bytes > self._max_bytes:
            raise DamagedImportError(f"{self.where}: an archive of {self.place.num_bytes} bytes")
        try:
            self._file = open_regular_file(self.path)
        except DamagedError as error:
            raise DamagedImportError(error.problems[0].text) from error
        try:
            window = _Window(self._file, self.place.start, self.place.num_bytes)
            self._zip = zipfile.ZipFile(io.BufferedReader(window))
            # a member's name starts with the name of the archive
            self._members = {info.filename.partition("/")[2]: info for info in self._zip.infolist()}
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            self._file.close()
            raise DamagedImportError(f"{self.where}: no archive of torch.save ({error})") from error
        return self

    def __exit__(self, *error: object) -> None:
        self._zip.close()
        self._file.close()

    def load(self) -> Any:
        """Return the object of the archive."""
        try:
            return read_pickle(self.member("data.pkl"))
        except ValueError as error:
            raise DamagedImportError(f"{self.where}: {error}") from error

    def tensor(self) -> Tensor:
        """Return the tensor of the archive."""
        record = self.load()
        try:
            return self.rebuilt(record)
        except NOT_AS_EXPECTED as error:
            raise DamagedImportError(f"{self.where}: {str(error)[:300]}") from error

    def rebuilt(self, record: Any) -> Tensor:
        """Return the tensor that a record stands for."""
        if path_of(record) != "torch._utils._rebuild_tensor_v2":
            raise ValueError(f"{path_of(record) or type(record).__name__} is not a tensor")
        (_, storage, key, _, numel), offset, _, stride = record.arguments[:4]
        size = size_of(record)
        if not are_counts((numel, offset, *stride)) or math.prod(size) > numel:
            raise ValueError(f"a tensor of size {size} in a storage of {numel} elements")
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        dtype, info = _STORAGES[path_of(storage)], self._info(f"data/{key}")
        if last >= numel or info.file_size != numel * dtype.itemsize or self.member("byteorder") != b"little":
            raise ValueError(f"{info.file_size} bytes for {numel} elements")
        data = torch.empty(info.file_size, dtype=torch.uint8)
        with self._open(info) as source:
            for block in data.split(_BLOCK_BYTES):
                found = source.read(len(block))
                if len(found) != len(block):
                    raise ValueError(f"{info.filename} ends early")
                block.numpy()[:] = memoryview(found)
            source.read(1)  # the checksum is compared at the end
        return data.view(dtype).as_strided(size, stride, offset)

    def member(self, name: str) -> bytes:
        """Return the data of a member, named without the name of the archive."""
        with self._open(self._info(name)) as source:
            return source.read()

    @contextmanager
    def _open(self, info: zipfile.ZipInfo) -> Iterator[IO[bytes]]:
        try:
            with self._zip.open(info) as source:
                yield source
        except (zipfile.BadZipFile, RuntimeError, EOFError, OSError) as error:
            raise ValueError(f"{info.filename}: {error}") from error

    def _info(self, name: str) -> zipfile.ZipInfo:
        info = self._members.get(name)
        if info is None:
            raise ValueError(f"the archive has no {name}")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > self.place.num_bytes:
            raise ValueError(f"{name} is compressed, which torch.save never does")
        return info


class _Window(io.RawIOBase):
    """Bytes of an open file as a file of their own."""

    def __init__(self, file: io.FileIO, start: int, num_bytes: int) -> None:
        self._file, self._start, self._num_bytes, self._place = file, start, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._num_bytes}[whence]
        if base + offset < 0:
            raise ValueError("a place before the archive")
        self._place = base + offset
        return self._place

    def readinto(self, buffer: Any, /) -> int:
        left = max(self._num_bytes - self._place, 0)
        self._file.seek(self._start + self._place)
        count = self._file.readinto(memoryview(buffer)[:left]) or 0
        self._place += count
        return count


def are_counts(values: tuple[Any, ...]) -> bool:
    """Return whether all values are integers of at least 0 that may count bytes or elements."""
    return all(type(value) is int and 0 <= value < _MAX_COUNT for value in values)


def tensor_record(value: Any) -> Record | None:
    """Return the record of a floating-point tensor or parameter; None for other values."""
    if path_of(value) == "torch._utils._rebuild_parameter":
        value = value.arguments[0]
    is_tensor = isinstance(value, Record) and path_of(value) == "torch._utils._rebuild_tensor_v2"
    return value if is_tensor and path_of(value.arguments[0][1]) in _STORAGES else None


def dtype_of(record: Record) -> torch.dtype:
    """Return the dtype of a tensor's record."""
    return _STORAGES[path_of(record.arguments[0][1])]


def size_of(record: Record) -> tuple[int, ...]:
    """Return the size of a tensor's record.

    Raises:
        ValueError: it is not one.
    """
    size = tuple(record.arguments[2])
    if not 1 <= len(size) <= MAX_DIMENSIONS or not are_counts(size) or 0 in size:
        raise ValueError(f"{str(size)[:100]} is not a size")
    return size
