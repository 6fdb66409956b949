"""Planted faults of distillation: its teacher's mode, weights, stages and rows, and the scale of its losses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import Tensor

from megatrain.config.subjects.pipeline import layer_ranges
from megatrain.kernels.divergence import statistics
from megatrain.model import distillation as losses
from megatrain.model.distillation import Divergence, PairLoss
from megatrain.parallel.batch import PassInfo
from megatrain.tools.parity.runs.program import Patch
from megatrain.training.distillation import teacher as distillation
from megatrain.training.distillation.teacher import RunTeacher


def _with_dropout() -> AbstractContextManager[Any]:
    """Run the teacher in training mode."""

    def training(**fields: Any) -> PassInfo:
        return PassInfo(**{**fields, "is_training": True})

    return mock.patch.object(distillation, "PassInfo", training)


def _square_missing() -> AbstractContextManager[Any]:
    gradient = Divergence.gradient

    def smaller(self: Divergence, logits: Tensor, chunk: slice, factor: float) -> Tensor:
        return gradient(self, logits, chunk, factor / self.spec.temperature**2)

    return mock.patch.object(Divergence, "gradient", smaller)


def _padding_counted() -> AbstractContextManager[Any]:
    def whole(logits: Tensor, teacher: Tensor, temperature: float, _: int, **named: bool) -> Tensor:
        return statistics(logits, teacher, temperature, logits.shape[1], **named)

    return mock.patch.object(losses, "statistics", whole)


def _weights_move() -> AbstractContextManager[Any]:
    """Change the teacher's weights in every pass, as an optimizer would if gradients reached them."""
    run = RunTeacher.run

    def moving(self: RunTeacher, *arguments: Any) -> None:
        run(self, *arguments)
        for weights in self.buffers.weights.full:
            weights.mul_(1 + 1e-6)

    return mock.patch.object(RunTeacher, "run", moving)


def _stages_overlap() -> AbstractContextManager[Any]:
    """Begin every later stage of the teacher one layer early."""

    def early(counts: Sequence[int]) -> list[range]:
        return [range(max(one.start - 1, 0), one.stop) for one in layer_ranges(counts)]

    return mock.patch.object(distillation, "layer_ranges", early)


def _pairs_summed_over_ranks() -> AbstractContextManager[Any]:
    """Give every tensor rank the gradient of its rows as that of all rows."""
    forward = PairLoss.forward

    def larger(self: PairLoss, *arguments: Any) -> Tensor:
        return forward(self, *arguments) * self.tp.size

    return mock.patch.object(PairLoss, "forward", larger)


def _balanced_per_rank() -> AbstractContextManager[Any]:
    """Balance the losses of each context rank's tokens alone."""
    mean_losses = losses.DistilledHead._mean_losses

    def alone(self: losses.DistilledHead, *arguments: Any) -> Tensor:
        group = self.distillation.cp
        self.distillation.cp = replace(group, ranks=(group.ranks[group.rank],), rank=0)
        try:
            return mean_losses(self, *arguments)
        finally:
            self.distillation.cp = group

    return mock.patch.object(losses.DistilledHead, "_mean_losses", alone)


def _later_microbatch() -> AbstractContextManager[Any]:
    """Match the outputs of another micro-batch of the step."""
    run = RunTeacher.run

    def rotated(self: RunTeacher, batches: Any, infos: Any) -> None:
        run(self, batches, infos)
        found = self.parts.last.found if self.parts.last is not None else {}
        numbers = sorted(found)
        moved = [found[number] for number in (*numbers[1:], *numbers[:1])]
        found.update(zip(numbers, moved, strict=True))

    return mock.patch.object(RunTeacher, "run", rotated)


def _maximum_per_rank() -> AbstractContextManager[Any]:
    """Normalize each rank's columns alone."""

    def own(x: Tensor, *_: Any) -> Tensor:
        return x

    return mock.patch.object(losses, "all_reduce", own)


DISTILLATION_FAULTS: dict[str, tuple[Patch, str]] = {
    "teacher with dropout": (_with_dropout, "dp2 teacher"),
    "square of the temperature missing": (_square_missing, "dp2 teacher"),
    "teacher's logits of padded rows counted": (_padding_counted, "tp2 teacher padded120"),
    "teacher's weights move": (_weights_move, "dp2 reverseteacher"),
    "teacher's stages overlap": (_stages_overlap, "pp2 teacher"),
    "gradient of matched layers counted per tensor rank": (_pairs_summed_over_ranks, "tp2 sp matchedlayers"),
    "losses balanced per context rank": (_balanced_per_rank, "cp2 teacher"),
    "teacher's outputs of another micro-batch": (_later_microbatch, "pp2 teacher"),
    "logits of a teacher normalized per rank": (_maximum_per_rank, "tp2 reverseteacher"),
}
"""The function that plants each fault, and the layout in which parity finds it."""
