"""Planted faults of multi-token prediction: shifted tokens and labels, the weight of its loss, the columns of its projection."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatrain.model import mtp
from megatrain.model.head import Head
from megatrain.parallel.batch import Batch
from megatrain.parallel.batches_ahead import with_batches_ahead
from megatrain.tools.parity.runs.program import Patch
from megatrain.training import engine
from megatrain.training.engine import Engine


def _labels_off_by_one() -> AbstractContextManager[Any]:
    """Give the second rank labels that are one position less far ahead."""

    def less_far(batch: Batch, count: int) -> Batch:
        shifted = with_batches_ahead(batch, count)
        if dist.get_rank() == 0:
            return shifted
        nearer = [batch, *shifted.ahead[:-1]]
        ahead = [
            replace(one, labels=near.labels, denominator=None)
            for one, near in zip(shifted.ahead, nearer, strict=True)
        ]
        return replace(shifted, ahead=tuple(ahead), denominator=shifted.loss_denominator)

    return mock.patch.object(engine, "with_batches_ahead", less_far)


def _shifted_after_the_split() -> AbstractContextManager[Any]:
    """Shift tokens and labels within each context rank's rows."""
    shard = Engine.shard_batches

    def shifted(self: Engine, batches: Sequence[Batch]) -> list[Batch]:
        count = self.num_depths
        return [with_batches_ahead(batch, count) for batch in shard(self, batches)]

    return mock.patch.object(Engine, "shard_batches", shifted)


def _loss_counted_per_stage() -> AbstractContextManager[Any]:
    loss = Head._loss

    def larger(self: Head, *arguments: Any) -> torch.Tensor:
        factor = self.mtp_loss_factor * dist.get_world_size()
        with mock.patch.object(self, "mtp_loss_factor", factor):
            return loss(self, *arguments)

    return mock.patch.object(Head, "_loss", larger)


def _columns_not_gathered() -> AbstractContextManager[Any]:
    def own_columns(x: torch.Tensor, tp: Any) -> torch.Tensor:
        return torch.cat([x] * tp.size, dim=-1)

    return mock.patch.object(mtp, "gather_columns", own_columns)


MTP_FAULTS: dict[str, tuple[Patch, str]] = {
    "labels of multi-token prediction off by one": (_labels_off_by_one, "dp2 mtp2"),
    "tokens ahead shifted within a context rank's rows": (_shifted_after_the_split, "cp2 mtp1"),
    "loss of multi-token prediction counted per stage": (_loss_counted_per_stage, "pp2 mtp1"),
    "columns of a projection not gathered": (_columns_not_gathered, "tp2 mtp1"),
}
"""The function that plants each fault, and the layout in which parity finds it."""
