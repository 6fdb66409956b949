"""`status.json` in the `--save` folder: whether the run is active, and how it ended. The first end that is recorded is kept.

A later start that is refused does not replace the end of the run: it is recorded as `refused_start`, until a run starts.
A status that cannot be written ends no run; on a full disk it replaces the former status in place.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from megatrain.storage.files import describe_write_error, open_regular, read_regular, replace_file, write_all
from megatrain.training.liveness.failure import Failure

_MAX_BYTES = 1 << 20


class StatusFile:
    """The `status.json` of one run.

    Args:
        folder: the `--save` folder; None: write nothing, as on all ranks but rank 0.
        iteration: returns the number of completed iterations; called at each write.
        last_save: returns size and times of the last save that was committed, or None; called at each write.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        iteration: Callable[[], int],
        last_save: Callable[[], Mapping[str, Any] | None] = lambda: None,
    ) -> None:
        self.folder = folder
        self.iteration, self.last_save = iteration, last_save
        self._lock = threading.RLock()
        self._has_peer_failure = False

    def write(self, exit_code: int | None, reason: str) -> None:
        """Write the current state; an exit code of None means that the run is active."""
        if self.folder is not None and self.folder.is_dir():
            with self._lock:  # the thread of the rank watch writes, too
                write_status(
                    self.folder,
                    exit_code=exit_code,
                    reason=reason,
                    iteration=self.iteration(),
                    last_save=self.last_save(),
                )

    def record_save(self) -> None:
        """Record that a save was committed; the run is active."""
        with self._lock:
            if not self._has_peer_failure:
                self.write(None, "running")

    def record_refused_start(self, exit_code: int, reason: str) -> None:
        """Record that this run did not start."""
        if self.folder is not None and self.folder.is_dir():
            write_refused_start(self.folder, exit_code=exit_code, reason=reason)

    def record_peer_failure(self, failure: Failure) -> None:
        """Record another rank's failure as the end of the run; later ends of this rank are its consequences."""
        with self._lock:
            self.write(failure.exit_code, str(failure))
            self._has_peer_failure = True

    def record_end(self, exit_code: int, reason: str) -> None:
        """Record how this rank ended, unless a peer's failure came first."""
        with self._lock:
            if not self._has_peer_failure:
                self.write(exit_code, reason)


def write_status(
    folder: Path,
    *,
    exit_code: int | None,
    reason: str,
    iteration: int | None,
    last_save: Mapping[str, Any] | None = None,
) -> None:
    """Write the status of a run.

    Args:
        exit_code: the exit code of pretrain.py, which launchers such as torchrun hide; None while the run is active.
        iteration: completed iterations; None for a run that did not start.
        last_save: the last save that this process committed.
    """
    entry = _entry(exit_code=exit_code, reason=reason)
    _write(folder, entry | {"iteration": iteration, "last_save": last_save})


def write_refused_start(folder: Path, *, exit_code: int, reason: str) -> None:
    """Record a start that was refused: next to the status of an earlier run, or as the status if there is none."""
    try:
        status = json.loads(read_regular(folder / "status.json", max_bytes=_MAX_BYTES))
        has_run = status["iteration"] is not None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        has_run = False
    if has_run:
        _write(folder, status | {"refused_start": _entry(exit_code=exit_code, reason=reason)})
    else:
        write_status(folder, exit_code=exit_code, reason=reason, iteration=None)


def _entry(*, exit_code: int | None, reason: str) -> dict[str, Any]:
    return {
        "exit_code": exit_code,
        "reason": reason,
        "pid": os.getpid(),
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _write(folder: Path, status: dict[str, Any]) -> None:
    path, content = folder / "status.json", json.dumps(status).encode() + b"\n"
    try:
        replace_file(path, [content])
    except OSError as error:
        print(
            f"WARNING: {describe_write_error(error, path, needed_bytes=len(content))}",
            file=sys.stderr,
            flush=True,
        )
        _write_in_place(path, content)


def _write_in_place(path: Path, content: bytes) -> None:
    """Overwrite the status without new disk space; remove it if that fails, since it would say that the run is active."""
    try:
        descriptor = open_regular(path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            write_all(descriptor, content)
            os.ftruncate(descriptor, len(content))
        finally:
            os.close(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
