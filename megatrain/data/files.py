"""Output files: errors that name the file and the remedy, and locks; and optional packages."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from megatrain.config.errors import ConfigError, InputError, MegatrainError
from megatrain.storage.files import fsync, open_regular

_SECONDS_BETWEEN_TRIES: Final = 0.5
"""Between two attempts to take a lock that another process has."""


def log_to_stderr(text: str) -> None:
    """Print a line to stderr; stdout is reserved for results."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def report_write_errors(path: Path) -> Iterator[None]:
    """Convert OSError to MegatrainError that names the file."""
    try:
        yield
    except OSError as error:
        raise MegatrainError(
            f"{path}: cannot be written: {error.strerror or error}",
            fix="free disk space or repair the disk, then run again",
        ) from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file and flush it to disk."""
    with report_write_errors(path), path.open("wb") as file:
        file.write(json.dumps(content, indent=2).encode() + b"\n")
        fsync(file)


class FileLock:
    """An exclusive lock between processes: a locked file, which the kernel unlocks when its owner dies.

    The file exists while the lock is held; a file left by a dead owner is not locked.
    """

    def __init__(self, path: Path, *, target: str, log: Callable[[str], None] = log_to_stderr) -> None:
        """Prepare a lock. `target` describes the protected output, for messages."""
        self._path = path
        self._target = target
        self._log = log
        self._file: IO[bytes] | None = None

    @property
    def is_held(self) -> bool:
        """True if this object holds the lock."""
        return self._file is not None

    def acquire(self, *, waits: bool = False) -> None:
        """Take the lock. Raises InputError if another process has it, unless this one waits, or the folder is not writable."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open_locked()
        except BlockingIOError as error:
            if waits:
                self._log(f"waiting for another run, which writes to {self._target}")
                self._acquire_later()
                return
            raise InputError(
                f"{self._path}: another run is writing to {self._target}",
                fix="wait for it, stop it, or give another output prefix",
            ) from error
        except OSError as error:
            raise InputError(
                f"{self._path}: cannot be written: {error.strerror}",
                fix="give a prefix in a writable folder",
            ) from error

    def release(self) -> None:
        """Release the lock and remove its file. Does nothing if the lock is not held."""
        if self._file is not None:
            # Before closing: no other process can hold this file's lock yet.
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None

    def _acquire_later(self) -> None:
        while self._file is None:
            time.sleep(_SECONDS_BETWEEN_TRIES)
            with contextlib.suppress(BlockingIOError):
                self._file = self._open_locked()

    def _open_locked(self) -> IO[bytes]:
        while True:
            file = os.fdopen(open_regular(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(file.fileno()).st_ino == self._path.stat().st_ino:
                    return file
            except FileNotFoundError:
                pass  # the previous owner has just removed the file: open a new one
            except OSError as error:
                if error.errno not in {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}:
                    file.close()
                    raise
                self._log(
                    f"{self._path}: this file system has no locks; make sure that no other run writes to {self._target}"
                )
                return file
            file.close()


def optional_package(name: str, *, needed_for: str) -> Any:
    """Import a module of a package that megatrain does not require. Raises ConfigError if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"{needed_for} needs the package {package}, which cannot be imported: {error}",
            fix=f"pip install {package}",
        ) from error


def different_ends(paths: Sequence[Sequence[str]]) -> list[str] | None:
    """Return the fewest last components of each path with which all paths differ; None: two are equal."""
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(components[-length:]) for components in paths]
        if len(set(names)) == len(names):
            return names
    return None
