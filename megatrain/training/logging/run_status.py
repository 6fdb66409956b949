"""`status.json` of a run: that it runs, and how it came to its end, of which the first that is heard of counts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from megatrain.training.launch.failure import Failure
from megatrain.training.logging.metrics import write_status


class RunStatus:
    """What `status.json` says.

    Args:
        folder: of `--save`; None where nothing is written, which goes for all ranks but the first, too.
        iteration: how far the run has come, asked for at each writing.
    """

    def __init__(self, folder: Path | None, iteration: Callable[[], int]) -> None:
        self.folder = folder
        self.iteration = iteration
        self._lock = threading.Lock()
        self._has_ended_elsewhere = False

    def write(self, exit_code: int | None, reason: str) -> None:
        if self.folder is not None and self.folder.is_dir():
            write_status(self.folder, exit_code=exit_code, reason=reason, iteration=self.iteration())

    def note_end_of_another(self, failure: Failure) -> None:
        """Another rank's end is this run's; what breaks here afterwards is not."""
        with self._lock:
            self.write(failure.exit_code, str(failure))
            self._has_ended_elsewhere = True

    def note_own_end(self, exit_code: int, reason: str) -> None:
        with self._lock:
            if not self._has_ended_elsewhere:
                self.write(exit_code, reason)
