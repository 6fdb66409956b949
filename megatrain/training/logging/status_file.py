"""`status.json` in the `--save` folder: whether the run is active, and how it ended. The first end that is recorded is kept.

A later start that is refused does not replace the end of the run: it is recorded as `refused_start`, until a run starts.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from megatrain.training.launch.failure import Failure


class StatusFile:
    """The `status.json` of one run.

    Args:
        folder: the `--save` folder; None: write nothing, as on all ranks but rank 0.
        iteration: returns the number of completed iterations; called at each write.
    """

    def __init__(self, folder: Path | None, iteration: Callable[[], int]) -> None:
        self.folder = folder
        self.iteration = iteration
        self._lock = threading.Lock()
        self._has_peer_failure = False

    def write(self, exit_code: int | None, reason: str) -> None:
        """Write the current state; an exit code of None means that the run is active."""
        if self.folder is not None and self.folder.is_dir():
            write_status(self.folder, exit_code=exit_code, reason=reason, iteration=self.iteration())

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


def write_status(folder: Path, *, exit_code: int | None, reason: str, iteration: int | None) -> None:
    """Write the status of a run.

    Args:
        exit_code: the exit code of pretrain.py, which launchers such as torchrun hide; None while the run is active.
        iteration: completed iterations; None for a run that did not start.
    """
    _write(folder, _entry(exit_code=exit_code, reason=reason) | {"iteration": iteration})


def write_refused_start(folder: Path, *, exit_code: int, reason: str) -> None:
    """Record a start that was refused: next to the status of an earlier run, or as the status if there is none."""
    try:
        status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
        has_run = status["iteration"] is not None
    except (OSError, ValueError, KeyError, TypeError):
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
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / "status.json.tmp"
    temporary.write_text(json.dumps(status) + "\n", encoding="utf-8")
    temporary.replace(folder / "status.json")
