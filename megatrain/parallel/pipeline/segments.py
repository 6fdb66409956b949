"""Protocols of the executor: the segments that it runs, and the hooks that it calls around their passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.pipeline.actions import ActionKind


class Segment(Protocol):
    """A part of the model. The first one ignores `hidden`; the last one returns the scaled loss of the micro-batch."""

    def __call__(self, hidden: Tensor | None, batch: Batch, info: PassInfo) -> Tensor: ...


@dataclass(frozen=True)
class SegmentPass:
    """A pass of a micro-batch through a segment: forward, backward or weight gradients."""

    kind: ActionKind
    segment: int
    computes_gradients: bool = True
    """False for a forward pass, unless it computes weight gradients, as that of a head does if they are not deferred."""


class SegmentHooks(Protocol):
    """Callbacks around the passes of segments, for communication of weights and gradients."""

    def on_schedule(self, passes: Sequence[SegmentPass]) -> None:
        """A run of these passes begins, in this order."""

    def before(self, segment_pass: SegmentPass) -> None:
        """The next pass begins."""

    def after(self, segment_pass: SegmentPass) -> None:
        """The pass has ended."""

    def on_gradients(self, segment: int, *, is_last: bool) -> None:
        """All gradients of a micro-batch have been added to a segment's; `is_last`: of the step's last micro-batch."""
