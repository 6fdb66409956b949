"""Durable writes, file locks and optional packages.

Durable: written files and renames survive a power failure. Errors name the file and the remedy.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import json
import os
import shutil
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from megatrain.config.errors import ConfigError, InputError, MegatrainError

_READ_BYTES = 1 << 20


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
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise OSError(errno.EFBIG, f"{size} bytes, more than the limit of {max_bytes}", str(path))
        return file.read(size)


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


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file durably and as a whole: after a failure its former content is there. Links are replaced, not followed."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    try:
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def describe_write_error(error: OSError, path: Path, *, needed_bytes: int | None = None) -> str:
    """Return path, reason and errno of a failed write, with the bytes that it needed and that are free."""
    text = f"{error.filename or path}: {error.strerror or error} (errno {error.errno})"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return text
    with contextlib.suppress(OSError):
        needed = "" if needed_bytes is None else f"{needed_bytes} bytes needed, "
        text += f"; {needed}{shutil.disk_usage(path.parent).free} bytes free"
    return text


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

    def acquire(self) -> None:
        """Take the lock without waiting. Raises InputError if another process has it or the folder is not writable."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open_locked()
        except BlockingIOError as error:
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
