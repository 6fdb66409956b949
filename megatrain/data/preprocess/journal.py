"""How far an unfinished run has come, on disk; and a lock, so that only one run at a time works on a prefix.

<prefix>.preprocess.json   replaced as a whole: before or after a power cut, one of its versions is there
<prefix>.preprocess.lock   locked by the run

The journal holds a digest of itself: one that anything else has written to is not believed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatrain.data.files import flush_folder, write_json, writing
from megatrain.data.locks import FileLock


class DamagedError(Exception):
    """The journal is not as a run has written it. Says which file it is."""


class Journal:
    """Locked while its `with` block runs."""

    def __init__(self, prefix: str, say: Callable[[str], None]) -> None:
        self._path, self._partial, lock = journal_files(prefix)
        self._lock = FileLock(lock, written=f"--output-prefix {prefix}", say=say)

    def __enter__(self) -> Self:
        """Take the lock. Raises InputError if another run has it, or the folder cannot be written to."""
        self._lock.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go of the lock."""
        self._lock.release()

    @property
    def exists(self) -> bool:
        """Whether there is something to go on from."""
        return self._path.is_file()

    def read(self) -> dict[str, Any]:
        """What was written last; nothing if there is nothing. Raises DamagedError."""
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"{self._path} is damaged") from error
        if not isinstance(content, dict) or content.pop("digest", None) != _digest(content):
            raise DamagedError(f"{self._path} is damaged")
        return content

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace the content, which is not empty."""
        write_json(self._partial, {**content, "digest": _digest(content)})
        with writing(self._path):
            self._partial.replace(self._path)
            flush_folder(self._path.parent)

    def remove(self) -> None:
        """There is nothing to go on from any more."""
        self._path.unlink(missing_ok=True)
        self._partial.unlink(missing_ok=True)


def journal_files(prefix: str) -> tuple[Path, Path, Path]:
    """The journal of a prefix, the one that is being written, and the lock."""
    return (
        Path(f"{prefix}.preprocess.json"),
        Path(f"{prefix}.preprocess.json.partial"),
        Path(f"{prefix}.preprocess.lock"),
    )


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
