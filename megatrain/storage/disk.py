"""File operations of a save, as one object, so that a test can make each of them fail."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Final

from megatrain.storage.files import fsync_folder

_PIECE: Final = 64 << 20
"""Bytes after which the disk begins to write."""
_SYNC_FILE_RANGE_WRITE: Final = 2


class Disk:
    """A file system. Data survives a power failure only after fsync; renames are atomic."""

    def free_bytes(self, folder: Path) -> int:
        """Return the free space at a folder, which may not exist yet."""
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        return shutil.disk_usage(existing).free

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> FileIO:
        """Create a file; raise an error if it exists."""
        return FileIO(path, "x")

    def write(self, file: FileIO, data: bytes | memoryview) -> None:
        """Append all of `data`. The disk begins to write large data before the file is synced, while the page cache is filled."""
        rest = memoryview(data).cast("B")
        while rest:
            count = file.write(rest[:_PIECE]) or 0
            rest = rest[count:]
            if count == _PIECE:
                _begin_writeback(file, count)

    def sync(self, file: FileIO) -> None:
        """Fsync the data of a file."""
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Fsync the names in a folder."""
        fsync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Remove a file, a link, or a folder and its content."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _begin_writeback(file: FileIO, count: int) -> None:
    """Ask Linux to begin writing the last `count` bytes to the disk; it may ignore this, and `sync` reports errors."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "sync_file_range"):
        start = ctypes.c_int64(file.tell() - count)
        libc.sync_file_range(file.fileno(), start, ctypes.c_int64(count), _SYNC_FILE_RANGE_WRITE)


def write_file(disk: Disk, path: Path, data: bytes | memoryview) -> None:
    """Create a file of these bytes and fsync its data (not its name)."""
    with errors_name_file(path), disk.create(path) as file:
        disk.write(file, data)
        disk.sync(file)


@contextmanager
def errors_name_file(path: Path) -> Iterator[None]:
    """Add this file name to operating system errors that have none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
