"""Files in object stores and other places that fsspec reads by URL: s3://bucket/data/web, gs://..., https://...

    .bin    read in ranges, when samples need them
    .idx    copied to a local folder once per host (--object-storage-cache-path), under a name that changes with the file
    .json   read as a whole

A failed read is tried again, a limited number of times; then an error names the URL. Credentials are those of the package
of the store, from the environment or its files.

Source: Megatron-LM, core/datasets/object_storage_utils.py, for the flag and the division of work.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import ConfigError, InputError
from megatrain.data.files import optional_package, report_write_errors
from megatrain.storage.files import create_file, fsync_folder

ATTEMPTS: Final = 5
"""Reads of the same bytes before an error is raised."""
FIRST_WAIT_SECONDS: Final = 0.5
"""Time before the second attempt; it doubles with each further one."""
_COPIED_BYTES: Final = 1 << 26
_FINAL_ERRORS: Final = (
    PermissionError,
    IsADirectoryError,
    NotImplementedError,
    ImportError,
)
"""Errors that another attempt does not mend, as a missing file."""
_VERSION_FIELDS: Final = ("ETag", "Content-MD5", "Digest", "Last-Modified", "mtime")
"""Fields of a file that change with its content. fsspec's own key of a file at an http URL is its URL."""

Result = TypeVar("Result")


def is_url(prefix: str) -> bool:
    """Return True for the URL of a dataset, as opposed to a path."""
    return "://" in prefix


class RemoteFile:
    """The file of a URL. Thread-safe."""

    def __init__(self, url: str) -> None:
        """Look the file up.

        Raises:
            ConfigError: fsspec or the package of the protocol is missing, or the URL contains a password.
            InputError: there is no such file, or it cannot be read.
        """
        self.url = url
        self._files, self._path = _file_system(url)
        found = self._repeated(lambda: self._files.info(self._path), "cannot be found")
        if found.get("type") == "directory" or found.get("size") is None:
            raise InputError(
                f"{url}: is not a file of a known size", fix="give the prefix of .bin and .idx files"
            )
        self.size = int(found["size"])
        fields = [found.get(name) for name in _VERSION_FIELDS]
        if url.startswith(("http://", "https://")) and not any(fields):
            raise InputError(
                f"{url}: the server names neither a checksum nor a time, so that a copy could be of another version",
                fix="copy the dataset to a folder, or use a server that sends ETag or Last-Modified",
            )
        key = self._repeated(lambda: self._files.ukey(self._path), "cannot be found")
        self.version = hashlib.sha256(f"{key} {self.size} {fields}".encode()).hexdigest()[:16]
        """Changes with the file."""

    def read(self, position: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return bytes of the file. Raises InputError if they cannot be read, or the file has become shorter."""
        if not num_bytes:
            return np.empty(0, np.uint8)
        end = position + num_bytes
        data = self._repeated(
            lambda: self._whole(self._files.cat_file(self._path, start=position, end=end), num_bytes),
            f"bytes {position} to {end - 1} cannot be read",
        )
        return np.frombuffer(data, np.uint8)

    def _whole(self, data: bytes, num_bytes: int) -> bytes:
        if len(data) != num_bytes:
            raise OSError(f"{len(data)} of {num_bytes} bytes were returned")
        return data

    def _repeated(self, action: Callable[[], Result], problem: str) -> Result:
        """Return the result of a request, tried again after a failure."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return action()
            except Exception as error:  # each store has errors of its own
                is_final = isinstance(error, _FINAL_ERRORS) or _is_missing(error)
                if is_final or attempt == ATTEMPTS:
                    tried = "" if is_final else f" ({ATTEMPTS} attempts)"
                    reason = _reason(error)
                    raise InputError(
                        f"{self.url}: {problem}{tried}: {reason}",
                        fix="check the URL, the network and the credentials of the store, then run again",
                    ) from error
            time.sleep(FIRST_WAIT_SECONDS * 2 ** (attempt - 1))
        raise AssertionError("the last attempt returns or raises")


def local_copy(url: str, folder: str | None) -> Path:
    """Return a local copy of a file; a copy of the same version is reused.

    Raises:
        ConfigError: there is no folder for copies, or as for `RemoteFile`.
        MegatrainError: the folder cannot be written.
    """
    if folder is None:
        raise ConfigError(
            f"{url}: the index of a dataset in an object store is copied to a local folder, and none is given",
            fix="add --object-storage-cache-path FOLDER",
        )
    remote = RemoteFile(url)
    relative = re.sub(r"[^A-Za-z0-9_.=-]+", "_", url.rpartition("://")[2].removesuffix(".idx")).lstrip(".")
    path = Path(folder) / f"{relative[-100:]}.{remote.version}.idx"
    if path.is_file() and path.stat().st_size == remote.size:
        return path
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")  # several hosts may share the folder
    with report_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            starts = range(0, remote.size, _COPIED_BYTES)
            chunks = (remote.read(start, min(_COPIED_BYTES, remote.size - start)) for start in starts)
            create_file(temporary, (chunk.data for chunk in chunks))
            temporary.replace(path)
            fsync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def exists(path: str) -> bool:
    """Return whether there is a file under a path or a URL. Raises as `RemoteFile`, but not for a missing file."""
    if not is_url(path):
        return os.path.lexists(path)
    try:
        RemoteFile(path)
    except InputError as error:
        if _is_missing(error.__cause__):
            return False
        raise
    return True


def _file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it."""
    if re.search(r"://[^/@]*:[^/@]*@", url):
        hidden = re.sub(r"://[^/@]*@", "://...@", url)
        raise ConfigError(
            f"{hidden}: contains a password, which logs and checkpoints would repeat",
            fix="remove it from the URL, and give it in the environment or in the files of the store's package",
        )
    protocol = url.partition("://")[0]
    core = optional_package("fsspec.core", needed_for=f"{protocol}://")
    try:
        files, path = core.url_to_fs(url)
    except ImportError as error:
        raise ConfigError(
            f"{url}: a package for {protocol}:// is missing: {error}", fix=f"install it: {error}"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{url}: {error}", fix="give a path, or a URL of a protocol that fsspec knows, such as s3://"
        ) from error
    return files, path


def _is_missing(error: BaseException | None) -> bool:
    """Return whether there is no such file. At http URLs, fsspec also calls a file missing if the server cannot be reached."""
    if not isinstance(error, FileNotFoundError):
        return False
    cause = error.__cause__
    return cause is None or _is_missing(cause) or getattr(cause, "status", None) == 404


def _reason(error: Exception) -> str:
    if _is_missing(error):
        return "there is no such file"
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
    return str(cause or error).strip() or type(error).__name__
