"""The executor of packs: each pass computes in the group of its pack, and stages exchange as many rows as the pack has.

    stage 0   F0 F1 B0 F2 B1 ... B2        ranks 0 and 1 share packs 0 and 1, and only rank 0 has pack 2
    stage 1      F0 B0 F1 B1 ...

Ranks of a pipeline have the same packs. The order of 1F1B among the first packs does not depend on how many follow, so all
ranks of a group run the packs that they share in one order, and none waits for another in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.packs.context import PackBatch, PackContext
from megatrain.parallel.pipeline.actions import Action
from megatrain.parallel.pipeline.executor import Executor
from megatrain.parallel.tensor_parallel import TensorParallel


class PackExecutor(Executor):
    """Runs schedules of packs; `cp` and `tp` are the model's, other arguments those of `Executor`."""

    def __init__(self, *arguments: Any, cp: PackContext, tp: TensorParallel, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.cp, self.tp = cp, tp
        self._rows: list[int] = []

    def run(self, actions: Sequence[Action], batches: Sequence[Batch], infos: Sequence[PassInfo]) -> None:
        self._rows = [self.tp.sequence_rows(batch.tokens.shape[1]) for batch in batches]
        super().run(actions, batches, infos)

    def _empty(self, action: Action, info: PassInfo) -> Tensor:  # noqa: ARG002 (in evaluation as in training)
        _, samples, channels = self.hidden_shape
        size = self._rows[action.microbatch], samples, channels
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def _run_pass(self, run: Any, one: Action, number: int) -> None:
        batch = run.batches[one.microbatch]
        assert isinstance(batch, PackBatch), "a loader of packs"
        self.cp.enter(
            batch, run.state(one).info
        )  # before backward passes too: recomputed ones run forward again
        super()._run_pass(run, one, number)
