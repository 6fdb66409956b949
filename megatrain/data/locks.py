"""A lock that one process at a time holds: a file, which the kernel unlocks when its holder dies, however it dies."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import IO, TYPE_CHECKING

from megatrain.config.errors import InputError
from megatrain.data.progress import say

if TYPE_CHECKING:
    from collections.abc import Callable


class FileLock:
    """Held from `take` to `release`; its file is there for as long, or is a dead holder's, which locks nobody out."""

    def __init__(self, path: Path, *, written: str, say: Callable[[str], None] = say) -> None:
        """`written`: what the holder writes to, in words."""
        self._path = path
        self._written = written
        self._say = say
        self._file: IO[bytes] | None = None

    @property
    def is_held(self) -> bool:
        """Whether this object holds it."""
        return self._file is not None

    def take(self) -> None:
        """Take the lock, at once. Raises InputError if another holds it, or the folder cannot be written to."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._locked()
        except BlockingIOError as error:
            raise InputError(
                f"{self._path}: another run is writing to {self._written}",
                fix="wait for it, end it, or give another output prefix",
            ) from error
        except OSError as error:
            raise InputError(
                f"{self._path}: cannot be written: {error.strerror}",
                fix="give a prefix in a folder that can be written",
            ) from error

    def release(self) -> None:
        """Let go of it, and remove its file. May be done again."""
        if self._file is not None:
            self._path.unlink(
                missing_ok=True
            )  # while it is held: nobody loses a lock that they have just taken
            self._file.close()
            self._file = None

    def _locked(self) -> IO[bytes]:
        while True:
            file = self._path.open("ab")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(file.fileno()).st_ino == self._path.stat().st_ino:
                    return file
            except FileNotFoundError:
                pass  # the run that had it has just ended, and removed the file: take a new one
            except OSError as error:
                if error.errno not in {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}:
                    file.close()
                    raise
                self._say(
                    f"{self._path}: this file system has no locks; see that no other run writes to {self._written}"
                )
                return file
            file.close()
