"""A cache of index arrays on disk, so that the next start and the other ranks map them instead of computing them.

    key -> <folder>/<kind>-<digest of key>.index -> valid and of this key: mapped arrays
                                                 -> missing or invalid: computed, and written if the folder is writable

    file   magic 8 | header bytes u64 | header crc u32 | header (JSON: key, arrays) | padding to 64 | arrays, each padded

The arrays of a file are checked once: before it gets a modification time that belongs to its header, which a later change replaces. A
start that finds this time maps the arrays and does not read them.

A key names everything that the arrays depend on, so a file is never out of date. A file is written under a temporary
name and renamed, so readers find only complete files; two processes that write the same file write the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import struct
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from megatrain.storage.files import fsync, open_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

Arrays = dict[str, npt.NDArray[Any]]

MAGIC: Final = b"MTINDEX\x01"
PREFIX: Final = struct.Struct("<8sQI")
ALIGNMENT: Final = 64
WORTH_ROWS: Final = 1 << 16
"""Smaller indices are computed faster than a file is opened."""
_DTYPES: Final = frozenset(np.dtype(code).str for code in np.typecodes["AllInteger"] + np.typecodes["Float"])
CHECKED_PERIOD: Final = 86_389
"""Seconds, about a day: one of them is the modification time of a checked file."""
STALE_SECONDS: Final = 3600.0
"""Age after which a temporary file belongs to no running job."""


T = TypeVar("T")


class NotCachedError(Exception):
    """An index is not in the cache, and another process builds it."""


class Share(NamedTuple):
    """The missing indices that one of several processes builds: of each kind every `count`-th, from `number` on."""

    number: int
    num_processes: int


EVERYTHING: Final = Share(0, 1)


def all_built(builds: Iterable[Callable[[], T]]) -> list[T]:
    """Return what all functions build; a NotCachedError of one is raised after the last one, which may be of the own share."""
    built, missing = [], None
    for build in builds:
        try:
            built.append(build())
        except NotCachedError as error:
            missing = error
    if missing is not None:
        raise missing
    return built


class IndexCache:
    """A folder of cached arrays."""

    def __init__(
        self,
        folder: str | Path | None,
        log: Callable[[str], None] = lambda _: None,
        *,
        share: Share = EVERYTHING,
    ) -> None:
        """Use a folder, which need not exist or be writable; None: always compute.

        Args:
            folder: location of the files.
            log: receives one line if the folder cannot be written, and one for each invalid file.
            share: what is built if it is not cached; anything else is a NotCachedError.
        """
        self._share, self._num_asked = share, Counter[str]()
        self.folder = Path(folder) if folder is not None else None
        self._log = log
        self._is_writable = folder is not None

    def should_cache(self, num_rows: int) -> bool:
        """Return whether an index of this many rows is worth a file."""
        return self.folder is not None and num_rows >= WORTH_ROWS

    def arrays(self, kind: str, num_rows: int, key: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
        """Return the arrays of an index of so many rows: cached by its key if they are worth a file."""
        return self.get_or_build(kind, key, build) if self.should_cache(num_rows) else build()

    def get_or_build(self, kind: str, key: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
        """Return the arrays of a key, read-only if they come from a file. Its values are any JSON, or arrays, for their digest."""
        assert self.folder is not None, "ask `should_cache` first"
        is_own = self._num_asked[kind] % self._share.num_processes == self._share.number
        self._num_asked[kind] += 1
        text = json.dumps({"kind": kind, **key}, sort_keys=True, default=digest)
        path = self.folder / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.index"
        try:
            return _read(path, text)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            self._log(f"{path}: ignored and rebuilt: {error}")
        if not is_own:
            raise NotCachedError(path)
        arrays = build()
        if self._is_writable:
            try:
                _write(path, text, arrays)
            except OSError as error:
                self._is_writable = False
                self._log(
                    f"{self.folder}: cannot store sample indices ({error.strerror}); each start computes them again. "
                    "To store them, set --data-cache-path to a writable folder"
                )
            else:
                with contextlib.suppress(OSError, ValueError):  # the arrays in memory serve as well
                    return _read(path, text)  # mapped: the processes of a host share the memory
        return arrays


NO_CACHE: Final = IndexCache(None)


def digest(array: npt.NDArray[Any]) -> str:
    """Return a digest of an array."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def _read(path: Path, key: str) -> Arrays:
    """Map the arrays of a file. Raises ValueError if it is damaged or belongs to another key."""
    with os.fdopen(open_regular(path), "rb") as file:
        status = os.fstat(file.fileno())
        size = status.st_size
        prefix = file.read(PREFIX.size)
        if len(prefix) < PREFIX.size:
            raise ValueError(f"it ends after {size} bytes")
        magic, header_bytes, crc = PREFIX.unpack(prefix)
        if magic != MAGIC or header_bytes > size:
            raise ValueError("it is not an index file of this version")
        header = file.read(header_bytes)
    if zlib.crc32(header) != crc:
        raise ValueError("its header is damaged")
    described = json.loads(header)
    if not _is_header(described):
        raise ValueError("its header has a value of another type")
    if described["key"] != key:
        raise ValueError("it belongs to other data or settings")
    if described["bytes"] != size:
        raise ValueError(f"it has {size} bytes instead of {described['bytes']}")
    content = np.asarray(np.memmap(path, np.uint8, "r"))
    arrays, is_checked = {}, _is_checked(status.st_mtime_ns, crc)
    for array in described["arrays"]:
        part = content[array["start"] : array["start"] + array["bytes"]]
        if not is_checked and zlib.crc32(part.data) != array["crc"]:
            raise ValueError(f"its {array['name']} is damaged")
        arrays[array["name"]] = part.view(array["dtype"]).reshape(array["shape"])
    if not is_checked:
        _mark_as_checked(path, crc)
    return arrays


def _is_checked(mtime_ns: int, header_crc: int) -> bool:
    seconds, rest = divmod(mtime_ns, 10**9)
    return rest == 0 and (seconds - header_crc) % CHECKED_PERIOD == 0


def _mark_as_checked(path: Path, header_crc: int) -> None:
    """Set the modification time to the last one that `_is_checked` accepts."""
    now = int(time.time())
    seconds = now - (now - header_crc) % CHECKED_PERIOD
    with contextlib.suppress(OSError):  # another user's file, which each start checks
        os.utime(path, (seconds, seconds))


def _is_header(value: object) -> bool:
    """Return whether each value of a header has its type; a wrong number is found by size and checksum."""
    arrays = value.get("arrays") if isinstance(value, dict) and {"key", "bytes"} <= set(value) else None
    return isinstance(arrays, list) and all(
        isinstance(array, dict)
        and all(isinstance(array.get(name), str) for name in ("name", "dtype"))
        and all(_is_count(array.get(name)) for name in ("start", "bytes", "crc"))
        and isinstance(array.get("shape"), list)
        and all(map(_is_count, array["shape"]))
        and array["dtype"] in _DTYPES
        for array in arrays
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


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
    # The first start must not depend on the header's length, since the header contains the starts.
    position = _padded(PREFIX.size + len(_header(key, described, 0)) + 20 * (len(described) + 1))
    for array in described:
        array["start"] = position
        position = _padded(position + array["bytes"])
    header = _header(key, described, position)
    # Containers on one disk may have equal host names and process ids.
    writer = f"{os.uname().nodename}.{os.getpid()}.{secrets.token_hex(4)}"
    partial = path.with_name(f"{path.name}.{writer}.partial")
    try:
        with partial.open("wb") as file:
            file.write(PREFIX.pack(MAGIC, len(header), zlib.crc32(header)) + header)
            for array, values in zip(described, arrays.values(), strict=True):
                file.seek(array["start"])
                file.write(np.ascontiguousarray(values).data)
            file.truncate(position)
            fsync(file)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    _mark_as_checked(path, zlib.crc32(header))


def _header(key: str, arrays: list[dict[str, Any]], size: int) -> bytes:
    return json.dumps({"key": key, "bytes": size, "arrays": arrays}).encode()


def _padded(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def _remove_stale(path: Path) -> None:
    """Remove temporary versions of this file of killed jobs."""
    for partial in path.parent.glob(f"{path.name}.*.partial"):
        try:
            if time.time() - partial.stat().st_mtime > STALE_SECONDS:
                partial.unlink()
        except OSError:
            continue  # another job removed it, or permission is missing
