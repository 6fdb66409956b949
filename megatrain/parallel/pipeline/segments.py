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


class SegmentHooks:
    """Callbacks around the passes of segments, for communication of weights and gradients. These call others, or do nothing."""

    def __init__(self, hooks: SegmentHooks | None = None) -> None:
        self.hooks = hooks

    def on_schedule(self, passes: Sequence[SegmentPass]) -> None:
        """A run of these passes begins, in this order."""
        if self.hooks is not None:
            self.hooks.on_schedule(passes)

    def before(self, segment_pass: SegmentPass) -> None:
        """The next pass begins."""
        if self.hooks is not None:
            self.hooks.before(segment_pass)

    def after(self, segment_pass: SegmentPass) -> None:
        """The pass has ended."""
        if self.hooks is not None:
            self.hooks.after(segment_pass)

    def on_gradients(self, segment: int, *, is_last: bool) -> None:
        """All gradients of a micro-batch have been added to a segment's; `is_last`: of the step's last micro-batch."""
        if self.hooks is not None:
            self.hooks.on_gradients(segment, is_last=is_last)
