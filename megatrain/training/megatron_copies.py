"""Copies of committed checkpoints in Megatron-LM's format torch_dist, which a process of its own writes while the run trains.

commit of iteration 100 ─> `megatrain convert megatrain-to-megatron` reads its files ─> SAVE/torch_dist/iter_0000100
while a copy is being written, the newest checkpoint waits for it; a copy is removed after its checkpoint
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from megatrain.checkpoint.retention import remove_whole
from megatrain.storage.disk import Disk


class MegatronCopies:
    """The copies of the checkpoints in a folder, on the rank that commits them. The converter prints what it does."""

    def __init__(self, save: Path) -> None:
        self.save, self.folder = save, save / "torch_dist"
        self.waiting: Path | None = None
        """The checkpoint to copy next."""
        self._process: subprocess.Popen[bytes] | None = None

    def advance(self, *, waits: bool) -> Iterator[str]:
        """Begin to copy what waits if no copy is being written, or wait for all copies; yield a line for each that failed."""
        while self._process is not None or self.waiting is not None:
            if self._process is None:
                self._process, self.waiting = self._begin(), None
            elif waits or self._process.poll() is not None:
                code, self._process = self._process.wait(), None
                if code:
                    yield f"> WARNING: no copy in {self.folder}: the error stands above (exit code {code})"
            else:
                return

    def abandon(self) -> None:
        """Kill the copy that is being written, if there is one; it is not complete."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _begin(self) -> subprocess.Popen[bytes]:
        assert self.waiting is not None
        for copy in self.folder.glob("iter_*"):
            if copy.name == self.waiting.name or not (self.save / copy.name).exists():
                remove_whole(copy, Disk())
        program = ["-m", "megatrain.tools.main", "convert", "megatrain-to-megatron"]
        path = f"PYTHONPATH={os.pathsep.join(filter(None, sys.path))}"
        command = ["env", path, "CUDA_VISIBLE_DEVICES=", "nice", sys.executable, *program]
        return subprocess.Popen([*command, str(self.waiting), str(self.folder)])
