"""How far an unfinished run has come, on disk; and a lock, so that only one run at a time works on a prefix.

<prefix>.preprocess.json   replaced as a whole: before or after a power cut, one of its versions is there
<prefix>.preprocess.lock   locked by the run; the kernel lets go of it when the run dies, however it dies
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from megatrain.config.errors import InputError
from megatrain.data.files import flush_folder, write_json, writing


class Journal:
    """Locked while its `with` block runs."""

    def __init__(self, prefix: str, say: Callable[[str], None]) -> None:
        self._prefix = prefix
        self._say = say
        self._path = Path(f"{prefix}.preprocess.json")
        self._partial = Path(f"{self._path}.partial")
        self._lock_path = Path(f"{prefix}.preprocess.lock")

    def __enter__(self) -> Self:
        """Take the lock. Raises InputError if another run has it, or the folder cannot be written to."""
        try:
            self._lock_path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._locked()
        except BlockingIOError as error:
            raise InputError(
                f"{self._lock_path}: another run is writing to --output-prefix {self._prefix}",
                fix="wait for it, end it, or give another --output-prefix",
            ) from error
        except OSError as error:
            raise InputError(
                f"{self._lock_path}: cannot be written: {error.strerror}",
                fix="give a prefix in a folder that can be written",
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go of the lock."""
        self._lock_path.unlink(
            missing_ok=True
        )  # while it is held: nobody loses a lock that they have just taken
        self._lock.close()

    @property
    def exists(self) -> bool:
        """Whether there is something to go on from."""
        return self._path.is_file()

    def read(self) -> dict[str, Any]:
        """What was written last; nothing if there is nothing, or nothing that can be understood."""
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace the content."""
        write_json(self._partial, content)
        with writing(self._path):
            self._partial.replace(self._path)
            flush_folder(self._path.parent)

    def remove(self) -> None:
        """There is nothing to go on from any more."""
        self._path.unlink(missing_ok=True)
        self._partial.unlink(missing_ok=True)

    def _locked(self) -> IO[bytes]:
        while True:
            file = self._lock_path.open("ab")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(file.fileno()).st_ino == self._lock_path.stat().st_ino:
                    return file
            except FileNotFoundError:
                pass  # the run that had it has just ended, and removed the file: take a new one
            except OSError as error:
                if error.errno not in {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}:
                    file.close()
                    raise
                self._say(
                    f"{self._lock_path}: this file system has no locks; see that no other run has this prefix"
                )
                return file
            file.close()
