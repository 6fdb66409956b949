"""The operations on storage that a save is made of: one object, so that a test can let any of them fail.

Writing goes through `Disk`. Reading needs no such care: whatever it returns is checked against sums.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from megatrain.checkpoint.errors import DamagedError


class Disk:
    """A file system. Nothing is safe from a power cut before it is synchronised; renames are atomic."""

    def free_bytes(self, folder: Path) -> int:
        return shutil.disk_usage(folder).free

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> FileIO:
        """A new file; one that exists already is an error."""
        return FileIO(path, "x")

    def write(self, file: FileIO, data: bytes | memoryview) -> None:
        """Append all of `data`."""
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[file.write(rest) or 0 :]

    def sync(self, file: FileIO) -> None:
        """Make what was written to a file durable."""
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Remove a file, a link, or a folder with all that is in it."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def write_file(disk: Disk, path: Path, data: bytes | memoryview) -> None:
    """Create a file of these bytes, durable but for its name."""
    with naming(path), disk.create(path) as file:
        disk.write(file, data)
        disk.sync(file)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give errors of the system that name no file the name of this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def open_plain(path: Path) -> FileIO:
    """Open a file for reading. A link, a pipe or a device in its place is damage, and is not touched."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DamagedError(f"{path}: not a plain file")
    return FileIO(handle, "r")


def read_small(path: Path, *, most_bytes: int) -> bytes:
    """All of a file that has no business being large."""
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > most_bytes:
                raise DamagedError(f"{path}: {size} bytes, more than the {most_bytes} that are read")
            return file.read(size) or b""
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror}") from error


def read_into(file: FileIO, target: memoryview, offset: int, path: Path) -> None:
    """Fill `target` from a place in a file; `path` is its name in messages."""
    while target:
        try:
            count = os.preadv(file.fileno(), [target], offset)
        except OSError as error:
            raise DamagedError(f"{path}: {error.strerror}") from error
        if count == 0:
            raise DamagedError(f"{path}: ends {len(target)} bytes early")
        target, offset = target[count:], offset + count
