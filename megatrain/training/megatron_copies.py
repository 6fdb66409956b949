"""Copies of committed checkpoints in Megatron-LM's format torch_dist, which a process of its own writes while the run trains.

commit of iteration 100 ─> `megatrain convert megatrain-to-megatron` reads its files ─> SAVE/torch_dist/iter_0000100
the next commit and the end of the run wait for it; a copy is removed after its checkpoint
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from megatrain.checkpoint.retention import remove_whole
from megatrain.storage.disk import Disk


class MegatronCopies:
    """The copies of the checkpoints in a folder, on the rank that commits them; the converter prints what it does."""

    def __init__(self, save: Path) -> None:
        self.save, self.folder = save, save / "torch_dist"
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self, checkpoint: Path) -> None:
        """Begin to copy a checkpoint; no other copy is being written."""
        for copy in self.folder.glob("iter_*"):
            if copy.name == checkpoint.name or not (self.save / copy.name).exists():
                remove_whole(copy, Disk())
        program = ["-m", "megatrain.tools.main", "convert", "megatrain-to-megatron", checkpoint, self.folder]
        path = f"PYTHONPATH={os.pathsep.join(filter(None, sys.path))}"
        self._process = subprocess.Popen(
            ["env", path, "CUDA_VISIBLE_DEVICES=", "nice", sys.executable, *program]
        )

    def finish(self) -> str | None:
        """Wait for the copy that is being written; return a line if it failed."""
        process, self._process = self._process, None
        if process is None or process.wait() == 0:
            return None
        return f"> WARNING: no copy for Megatron-LM in {self.folder}: its error stands above (exit code {process.returncode})"
