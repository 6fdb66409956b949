"""Keeps arrays that took long to compute, so that the next start, and the other ranks of this one, map them from disk.

    key -> <folder>/<kind>-<digest of key>.index -> whole, of this key, unchanged? -> mapped arrays
                                                 -> not there, or not so: computed, and put there if that is possible

    file   magic 8 | header bytes u64 | header crc u32 | header (JSON: key, arrays) | padding to 64 | arrays, each padded

A key names everything that the arrays depend on, so that a file is never out of date. A file is written beside its
place and renamed, so that it is whole for whoever finds it; two that write the same file write the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
import struct
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Arrays = dict[str, npt.NDArray[Any]]

MAGIC: Final = b"MTINDEX\x01"
PREFIX: Final = struct.Struct("<8sQI")
ALIGNMENT: Final = 64
WORTH_ROWS: Final = 1 << 16
"""What has fewer rows is computed faster than a file is opened."""
STALE_SECONDS: Final = 3600.0
"""A temporary file this old belongs to no living job."""


class IndexCache:
    """A folder of cached arrays."""

    def __init__(self, folder: str | Path | None, say: Callable[[str], None] = lambda _: None) -> None:
        """Use a folder, which need not exist or be writable; None: compute everything anew.

        Args:
            folder: where files are looked for and left.
            say: told once why nothing can be left there, and of each file that is not what it should be.
        """
        self.folder = Path(folder) if folder is not None else None
        self._say = say
        self._is_writable = folder is not None

    def is_worth(self, num_rows: int) -> bool:
        """Whether an array of so many rows should be cached."""
        return self.folder is not None and num_rows >= WORTH_ROWS

    def find_or_make(self, kind: str, key: Mapping[str, Any], make: Callable[[], Arrays]) -> Arrays:
        """The arrays of a key (anything that JSON holds), read-only if they come from a file."""
        assert self.folder is not None, "ask `is_worth` first"
        text = json.dumps({"kind": kind, **key}, sort_keys=True)
        path = self.folder / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.index"
        try:
            return _read(path, text)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            self._say(f"{path}: not used, and made anew: {error}")
        arrays = make()
        if self._is_writable:
            try:
                _write(path, text, arrays)
            except OSError as error:
                self._is_writable = False
                self._say(
                    f"{self.folder}: sample indices cannot be kept here ({error.strerror}), and each start computes them: "
                    "give --data-cache-path a folder that can be written"
                )
        return arrays


def digest(array: npt.NDArray[Any]) -> str:
    """What an array holds, as part of a key."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def _read(path: Path, key: str) -> Arrays:
    """Map a file's arrays. Raises ValueError if it is damaged or another key's."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
        raise ValueError("it is no regular file")
    size = status.st_size
    with path.open("rb") as file:
        prefix = file.read(PREFIX.size)
        if len(prefix) < PREFIX.size:
            raise ValueError(f"it ends after {size} bytes")
        magic, header_bytes, crc = PREFIX.unpack(prefix)
        if magic != MAGIC or header_bytes > size:
            raise ValueError("it is no index file of this version")
        header = file.read(header_bytes)
    if zlib.crc32(header) != crc:
        raise ValueError("its header is damaged")
    described = json.loads(header)
    if described["key"] != key:
        raise ValueError("it belongs to other data or settings")
    if described["bytes"] != size:
        raise ValueError(f"it has {size} bytes, and should have {described['bytes']}")
    content = np.asarray(np.memmap(path, np.uint8, "r"))
    arrays = {}
    for array in described["arrays"]:
        part = content[array["start"] : array["start"] + array["bytes"]]
        if zlib.crc32(part.data) != array["crc"]:
            raise ValueError(f"its {array['name']} is damaged")
        arrays[array["name"]] = part.view(array["dtype"]).reshape(array["shape"])
    return arrays


def _write(path: Path, key: str, arrays: Arrays) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(path)
    described: list[dict[str, Any]] = [
        {
            "name": name,
            "dtype": array.dtype.str,
            "shape": array.shape,
            "start": 0,
            "bytes": array.nbytes,
            "crc": zlib.crc32(np.ascontiguousarray(array).data),
        }
        for name, array in arrays.items()
    ]
    # Starts are counted from a place that does not depend on how long the header becomes.
    position = _padded(PREFIX.size + len(_header(key, described, 0)) + 20 * (len(described) + 1))
    for array in described:
        array["start"] = position
        position = _padded(position + array["bytes"])
    header = _header(key, described, position)
    # Containers may share a disk, a host's name and the number of a process.
    writer = f"{os.uname().nodename}.{os.getpid()}.{secrets.token_hex(4)}"
    partial = path.with_name(f"{path.name}.{writer}.partial")
    try:
        with partial.open("wb") as file:
            file.write(PREFIX.pack(MAGIC, len(header), zlib.crc32(header)) + header)
            for array, values in zip(described, arrays.values(), strict=True):
                file.seek(array["start"])
                file.write(np.ascontiguousarray(values).data)
            file.truncate(position)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _header(key: str, arrays: list[dict[str, Any]], size: int) -> bytes:
    return json.dumps({"key": key, "bytes": size, "arrays": arrays}).encode()


def _padded(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def _remove_stale(path: Path) -> None:
    """Remove what killed jobs have left of this file."""
    for partial in path.parent.glob(f"{path.name}.*.partial"):
        try:
            if time.time() - partial.stat().st_mtime > STALE_SECONDS:
                partial.unlink()
        except OSError:
            continue  # another job was faster, or may not
