"""Copies of committed checkpoints in formats of other programs, which a process of its own writes while the run trains.

commit of iteration 100 ─> `megatrain convert ...` reads its files ─> SAVE/torch_dist/iter_0000100  --also-save torch_dist
                                                                 └──> SAVE/hf/iter_0000100          --save-hf-interval
while a copy is being written, the newest checkpoint waits for it; all checkpoints of --save-hf-interval do
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from megatrain.checkpoint.retention import remove_whole
from megatrain.config import Plan
from megatrain.config.errors import ConfigError, InputError
from megatrain.interop.hf.settings import fitting_family
from megatrain.storage.disk import Disk


class MegatronCopies:
    """The copies of the checkpoints in a folder, on the rank that commits them. The converter prints what it does.

    A copy is removed after its checkpoint.
    """

    converter: tuple[str, ...] = ("convert", "megatrain-to-megatron")
    format = "torch_dist"

    def __init__(self, save: Path) -> None:
        self.save, self.folder = save, save / self.format
        self._waiting: list[Path] = []
        """The checkpoints to copy, in order."""
        self._process: subprocess.Popen[bytes] | None = None

    def takes(self, iteration: int) -> bool:  # noqa: ARG002 (others take some)
        """Return whether the checkpoint of an iteration is copied."""
        return True

    def add(self, checkpoint: Path) -> None:
        """Let a checkpoint wait for its copy, in place of an older one that waits."""
        self._waiting = [checkpoint]

    def advance(self, *, waits: bool) -> Iterator[str]:
        """Begin to copy what waits if no copy is being written, or wait for all copies; yield a line for each that failed."""
        while self._process is not None or self._waiting:
            if self._process is None:
                self._process = self._begin(self._waiting.pop(0))
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

    def _begin(self, checkpoint: Path) -> subprocess.Popen[bytes]:
        for copy in self.folder.glob("iter_*"):
            if copy.name == checkpoint.name or self._is_left(copy):
                remove_whole(copy, Disk())
        program = ["-m", "megatrain.tools.main", *self.converter, str(checkpoint)]
        path = f"PYTHONPATH={os.pathsep.join(filter(None, sys.path))}"
        command = ["env", path, "CUDA_VISIBLE_DEVICES=", "nice", sys.executable, *program]
        return subprocess.Popen([*command, str(self._target(checkpoint))])

    def _is_left(self, copy: Path) -> bool:
        return not (self.save / copy.name).exists()

    def _target(self, checkpoint: Path) -> Path:  # noqa: ARG002 (others name it)
        return self.folder


class HfFolders(MegatronCopies):
    """Folders of transformers, of each `interval`-th iteration and the last one; they stay."""

    converter = ("convert", "megatrain-to-hf", "--no-compare")
    format = "hf"

    def __init__(self, save: Path, interval: int, last: int) -> None:
        super().__init__(save)
        self.interval, self.last = interval, last

    def takes(self, iteration: int) -> bool:
        """Return whether the checkpoint of an iteration is copied."""
        return iteration % self.interval == 0 or iteration >= self.last

    def add(self, checkpoint: Path) -> None:
        """Let a checkpoint wait for its copy after those that wait: each of them was asked for."""
        self._waiting.append(checkpoint)

    def _is_left(self, copy: Path) -> bool:  # noqa: ARG002 (they stay)
        return False

    def _target(self, checkpoint: Path) -> Path:
        return self.folder / checkpoint.name


def copies_of(plan: Plan) -> list[MegatronCopies]:
    """Return the copies that a run makes."""
    checkpoint, found = plan.config.checkpoint, list[MegatronCopies]()
    save = Path(checkpoint.save or "")
    if checkpoint.also_save is not None:
        found.append(MegatronCopies(save))
    if checkpoint.save_hf_interval is not None:
        found.append(HfFolders(save, checkpoint.save_hf_interval, plan.derived.train_iters))
    return found


def check_hf_folders(plan: Plan) -> None:
    """Raise ConfigError if transformers has no model that computes the same, with --save-hf-interval."""
    config = plan.config
    interval, model = config.checkpoint.save_hf_interval, config.model
    if interval is None or model.model_family == "vlm":  # its config.json has a token of the tokenizer
        return
    length = model.max_position_embeddings or config.data.seq_length
    config = dataclasses.replace(config, model=dataclasses.replace(model, max_position_embeddings=length))
    try:
        fitting_family(config, plan.derived.vocab_size, Path(config.checkpoint.save or ""))
    except InputError as error:
        raise ConfigError(
            f"--save-hf-interval {interval}: {error.problems[0].text}",
            fix="remove --save-hf-interval, or train a model that transformers has",
        ) from error
