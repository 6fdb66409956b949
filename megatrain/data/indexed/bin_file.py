"""The bytes of a `.bin` file on a local file system.

They are read by system calls, which do not hold Python's lock: a page fault of a mapped file stops all threads, for milliseconds on a
shared file system. An error of the disk is raised, and does not kill the process.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import InputError


class BinFile(Protocol):
    """The bytes of a `.bin` file, local or remote (`object_store.RemoteFile`). Thread-safe."""

    size: int

    def read(self, position: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return bytes of the file. Raises InputError if they cannot be read."""


class LocalBinFile:
    """A `.bin` file on a local file system. Implements `BinFile`."""

    def __init__(self, path: Path) -> None:
        """Open the file."""
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size

    def read(self, position: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        result = np.empty(num_bytes, np.uint8)
        view = memoryview(result.data)
        done = 0
        while done < num_bytes:  # a read may return fewer bytes, for example at 2 GiB
            try:
                got = os.preadv(self._descriptor, [view[done:]], position + done)
            except OSError as error:
                raise InputError(
                    f"{self._path}: byte {position + done} cannot be read: {error.strerror}",
                    fix="repair the disk, or copy the file from another place",
                ) from error
            if not got:
                self._check_end(position + num_bytes)
            done += got
        return result

    def _check_end(self, end: int) -> None:
        """Raise InputError if the file no longer reaches byte `end`."""
        size = os.fstat(self._descriptor).st_size
        if size < end:
            raise InputError(
                f"{self._path}: ends at byte {size}; it was truncated after it was opened",
                fix="copy the file again, and do not change data files during a run",
            )
