"""Copies of committed checkpoints in Megatron-LM's format torch_dist, which a process of its own writes while the run trains.

commit of iteration 100 ─> `megatrain convert megatrain-to-megatron` reads its files ─> SAVE/torch_dist/iter_0000100
the next commit and the end of the run wait for it; a copy is removed after its checkpoint
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from megatrain.checkpoint.retention import remove_whole
from megatrain.storage.disk import Disk


class MegatronCopies:
    """The copies of the checkpoints in a folder, on the rank that commits them."""

    def __init__(self, save: Path) -> None:
        self.save, self.folder = save, save / "torch_dist"
        self._running: tuple[subprocess.Popen[bytes], IO[bytes]] | None = None

    def begin(self, checkpoint: Path) -> None:
        """Begin to copy a checkpoint; no other copy is being written."""
        for copy in self.folder.glob("iter_*"):
            if copy.name == checkpoint.name or not (self.save / copy.name).exists():
                remove_whole(copy, Disk())
        output = tempfile.TemporaryFile()  # noqa: SIM115 (`finish` closes it)
        command = ["nice", sys.executable, "-m", "megatrain.tools.main", "convert", "megatrain-to-megatron"]
        process = subprocess.Popen(
            [*command, str(checkpoint), str(self.folder)],
            env=os.environ
            | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=output,
            stderr=output,
        )
        self._running = process, output

    def finish(self) -> str | None:
        """Wait for the copy that is being written; return a line about it, None if there is none."""
        if self._running is None:
            return None
        (process, output), self._running = self._running, None
        with output:
            code = process.wait()
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()
        text = next((line for line in lines if line.startswith(f"{self.folder}/")), " ".join(lines[-2:]))
        return f"> copied {text}" if code == 0 else f"> WARNING: no copy in {self.folder}: {text}"
