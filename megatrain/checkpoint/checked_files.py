"""Files whose content is compared with checksums, so that reads need no `Disk`: one that cannot be read is damaged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from megatrain.checkpoint.errors import DamagedError
from megatrain.storage.files import open_regular, read_limited


def open_regular_file(path: Path) -> FileIO:
    """Open a regular file for reading.

    Raises:
        DamagedError: it is a link, a pipe or a device, or cannot be opened.
    """
    with _damage(path):
        return FileIO(open_regular(path, os.O_RDONLY | os.O_NOFOLLOW), "r")


def read_small_file(path: Path, *, max_bytes: int) -> bytes:
    """Return the content of a file of at most `max_bytes`. Raises DamagedError."""
    with _damage(path), open_regular_file(path) as file:
        return read_limited(file, path, max_bytes=max_bytes)


def read_into(file: FileIO, target: memoryview, offset: int, path: Path) -> None:
    """Fill `target` from an offset of a file; `path` is its name in error messages. Raises DamagedError."""
    while target:
        with _damage(path):
            count = os.preadv(file.fileno(), [target], offset)
        if count == 0:
            raise DamagedError(f"{path}: ends {len(target)} bytes early")
        target, offset = target[count:], offset + count


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror}") from error
