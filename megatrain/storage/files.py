"""Durable writes, and reading of regular files.

Durable: written files and renames survive a power failure.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import zlib
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import IO

_READ_BYTES = 1 << 20


def fsync(file: IO[bytes]) -> None:
    """Flush a file to disk."""
    file.flush()
    os.fsync(file.fileno())


def fsync_folder(folder: Path) -> None:
    """Flush renames in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def create_file(path: Path, chunks: Iterable[bytes | memoryview], *, is_durable: bool = True) -> None:
    """Create a file and flush its data to disk; after a failure it does not exist. Raises FileExistsError if it did before."""
    with path.open("xb") as file:
        try:
            file.writelines(chunks)
            if is_durable:
                fsync(file)
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def replace_file(path: Path, chunks: Iterable[bytes], *, is_durable: bool = True) -> None:
    """Replace a file durably and as a whole: after a failure its former content is there. Links are replaced, not followed.

    A file that is not durable may be damaged or missing after a power failure.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    create_file(temporary, chunks, is_durable=is_durable)
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if is_durable:
        fsync_folder(path.parent)


def describe_write_error(error: OSError, path: Path, *, needed_bytes: int | None = None) -> str:
    """Return path, reason and errno of a failed write, with the bytes that it needed and that are free."""
    text = f"{error.filename or path}: {error.strerror or error} (errno {error.errno})"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return text
    with contextlib.suppress(OSError):
        needed = "" if needed_bytes is None else f"{needed_bytes:,} bytes needed, "
        text += f"; {needed}{shutil.disk_usage(path.parent).free:,} bytes free"
    return text


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file of a folder, for reading by default; return its descriptor.

    Raises:
        OSError: it is a pipe, a device or a folder, whose reading or writing may never end, or it cannot be opened.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # it was replaced since then
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """Return the content of a regular file. Raises OSError if it is larger than `max_bytes`, too."""
    with FileIO(open_regular(path), "r") as file:
        return read_limited(file, path, max_bytes=max_bytes)


def read_limited(file: FileIO, path: Path, *, max_bytes: int) -> bytes:
    """Return the content of an open regular file; `path` is its name in errors. Raises OSError if it is too large."""
    size = os.fstat(file.fileno()).st_size
    if size > max_bytes:
        raise OSError(errno.EFBIG, f"{size} bytes, more than the limit of {max_bytes}", str(path))
    return file.read(size) or b""


def is_start_intact(path: Path, *, num_bytes: int, crc32: int) -> bool:
    """Return whether the first `num_bytes` bytes of a file exist and have this crc32."""
    found, rest = 0, num_bytes
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            while rest and (data := file.read(min(rest, _READ_BYTES))):
                found, rest = zlib.crc32(data, found), rest - len(data)
    except FileNotFoundError:
        return False
    return not rest and found == crc32
