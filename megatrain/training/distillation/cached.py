"""The outputs of a teacher that `megatrain cache-logits` has written, as the head reads them.

Samples of a micro-batch have consecutive numbers, so the rank with the head reads their records from the files, and keeps its context
rank's rows. A sample with other tokens than those that the teacher has seen gets an infinite loss, which ends the run.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from megatrain.data.teacher_logits import LogitsReader, hash_weights, read_logits_manifest
from megatrain.model.distillation import TopTargets
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.context_parallel import ContextParallel


class RunCachedTeacher:
    """Cached outputs on one rank. Implements `CachedTeacher` of the model.

    Args:
        folder: has a valid manifest.
        device: of the outputs; a plan's, meta, reads no file.
    """

    def __init__(self, folder: Path, cp: ContextParallel, device: torch.device) -> None:
        self.folder, self.cp, self.device = folder, cp, device

    @cached_property
    def _reader(self) -> LogitsReader:
        return LogitsReader(self.folder, read_logits_manifest(self.folder))

    def targets(self, batch: Batch, info: PassInfo) -> TopTargets:
        """Return the outputs for this rank's tokens of the micro-batch of this pass."""
        samples, rows = batch.tokens.shape
        if self.device.type == "meta":
            return self._planned(samples * rows)
        assert isinstance(info.first_sample, int), "CUDA graphs are refused"
        found = self._reader.read(info.first_sample, samples)
        ids, values, rest, hashes = (
            torch.from_numpy(x)
            for x in (found.ids, found.log_probabilities, found.log_rest, found.token_hash)
        )
        positions = self.cp.positions(rows, torch.device("cpu"))
        of_rows = (x[:, positions].transpose(0, 1).flatten(0, 1) for x in (ids, values, rest))
        ids, values, rest = (self._moved(x) for x in of_rows)
        weights = self._moved(torch.from_numpy(hash_weights(rows * self.cp.size))[positions])
        own = all_reduce((batch.tokens * weights).sum(1), self.cp.group)
        is_right = (own == self._moved(hashes)).repeat(rows)
        return TopTargets(ids.long(), values, rest, is_right)

    def _moved(self, x: Tensor) -> Tensor:
        """Copy to the device without waiting."""
        if self.device.type != "cuda":
            return x
        return x.pin_memory().to(self.device, non_blocking=True)

    def _planned(self, tokens: int) -> TopTargets:
        """Return tensors of the sizes of a micro-batch's outputs."""
        k = read_logits_manifest(self.folder).top_k
        return TopTargets(
            torch.empty(tokens, k, dtype=torch.int64, device=self.device),
            torch.empty(tokens, k, dtype=torch.float16, device=self.device),
            torch.empty(tokens, dtype=torch.float32, device=self.device),
            torch.empty(tokens, dtype=torch.bool, device=self.device),
        )
