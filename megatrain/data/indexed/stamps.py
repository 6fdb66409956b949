"""Facts about large files that have not changed since they were computed, so that a start need not read the files again.

    size and modification time of each file ─> <folder>/stamp-<digest>.json ─> the facts
                                               missing or damaged ─> computed, and written if a folder is writable

A file that changes gets another modification time, so a stamp is never out of date. `megatrain data inspect` uses none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from megatrain.storage.files import replace_file
from megatrain.storage.untrusted_json import json_object, parse_json

WORTH_SEQUENCES: Final = 1 << 16
"""Smaller datasets are checked faster than a stamp is opened."""
_MAX_BYTES: Final = 1 << 20


class Stamp:
    """Facts about files.

    Args:
        files: the facts depend on their content alone.
        folders: the first one that has a stamp is read, the first one that is writable gets it.
    """

    def __init__(self, files: Sequence[Path], folders: Sequence[Path]) -> None:
        self._key = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
        name = hashlib.sha256(json.dumps(self._key).encode()).hexdigest()[:32]
        self._paths = [folder / f"stamp-{name}.json" for folder in folders]
        self._facts = self._read()

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return a fact, a JSON value; it is computed if it is not known."""
        if name not in self._facts:
            self._facts[name] = compute()
            self._write()
        return self._facts[name]

    def _read(self) -> dict[str, Any]:
        for path in self._paths:
            with contextlib.suppress(OSError, ValueError, RecursionError):
                content = json_object(parse_json(path.read_bytes(), max_bytes=_MAX_BYTES), "the stamp")
                facts = json_object(content.get("facts"), "facts")
                if content.get("files") == self._key and content.get("crc32") == _checksum(facts):
                    return facts
        return {}

    def _write(self) -> None:
        content = {"files": self._key, "facts": self._facts, "crc32": _checksum(self._facts)}
        for path in self._paths:
            with contextlib.suppress(OSError):  # the next start computes them again
                path.parent.mkdir(parents=True, exist_ok=True)
                # A flush for each of a thousand datasets costs a start ten seconds; a damaged stamp is computed again.
                replace_file(path, [json.dumps(content).encode()], is_durable=False)
                return


def _checksum(facts: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())
