"""The factor on the loss that keeps fp16 gradients within fp16's range.

    loss * scale -> backward -> gradients * scale -> norm and update divide by scale
    not finite: the step is skipped, and after `hysteresis` such steps the scale is halved at each further one
    finite:     after a window of such steps in a row the scale is doubled, and patience is whole again
    not finite for many steps in a row where the scale cannot shrink: the run is lost

Source: Micikevicius et al., arXiv:1710.03740. The rule is Megatron-LM's: a halving does not restore patience.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

_GROWTH, _BACKOFF = 2.0, 0.5
MOST_STUCK_STEPS: Final = 10
"""Steps in a row that are skipped at a scale that cannot shrink. One more would be no better: nothing changes but samples."""


class LossScaler(Protocol):
    """What the loss of each step is multiplied with."""

    scale: float
    stuck_steps: int
    """Steps in a row, up to the last one, that were not finite at a scale that cannot shrink."""

    @property
    def may_skip(self) -> bool:
        """Whether there are steps that are skipped: the next one then depends on how this one was."""

    def skips(self, lm_loss: float) -> bool:
        """Whether a step with this loss, or gradients, that are not finite is skipped rather than an error."""

    def update(self, *, is_finite: bool) -> None:
        """Learn how a step's gradients were."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take what a checkpoint kept."""


@dataclass
class ConstantLossScale:
    """The same factor for the whole run: --loss-scale, or 1 where the number format needs none."""

    scale: float = 1.0
    skips_gradients: bool = False
    """Whether gradients that overflow are no error, as the factor may be too large for some steps."""
    skips_all: bool = False
    """Whether nothing is."""
    stuck_steps: int = 0
    """See `LossScaler`."""

    @property
    def may_skip(self) -> bool:
        """See `LossScaler`."""
        return self.skips_gradients or self.skips_all

    def skips(self, lm_loss: float) -> bool:
        """See `LossScaler`."""
        is_stuck = self.stuck_steps >= MOST_STUCK_STEPS
        return self.skips_all or (self.skips_gradients and math.isfinite(lm_loss) and not is_stuck)

    def update(self, *, is_finite: bool) -> None:
        """See `LossScaler`."""
        self.stuck_steps = 0 if is_finite else self.stuck_steps + 1

    def state(self) -> dict[str, Any]:
        """See `LossScaler`."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `LossScaler`."""


@dataclass(kw_only=True)
class DynamicLossScale:
    """As large a factor as gradients allow."""

    scale: float
    minimum: float
    window: float
    """Finite steps in a row until the scale grows."""
    hysteresis: int
    """Steps that are not finite until the scale shrinks."""
    skips_all: bool = False
    """Whether the run goes on though it is lost."""
    may_skip = True

    def skips(self, lm_loss: float) -> bool:  # noqa: ARG002 (a loss may overflow too)
        """See `LossScaler`."""
        return self.skips_all or self.stuck_steps < MOST_STUCK_STEPS

    def __post_init__(self) -> None:
        self.finite_steps = self.stuck_steps = 0
        self.patience = self.hysteresis

    def update(self, *, is_finite: bool) -> None:
        """See `LossScaler`."""
        if not is_finite:
            self.finite_steps = 0
            self.stuck_steps += self.scale <= self.minimum
            self.patience -= 1
            if self.patience <= 0:
                self.scale = max(self.scale * _BACKOFF, self.minimum)
            return
        self.stuck_steps = 0
        self.finite_steps += 1
        if self.finite_steps >= self.window:
            self.finite_steps = 0
            self.patience = self.hysteresis
            self.scale *= _GROWTH

    def state(self) -> dict[str, Any]:
        """See `LossScaler`."""
        return {"scale": self.scale, "finite_steps": self.finite_steps, "patience": self.patience}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `LossScaler`. A checkpoint of another number format keeps nothing of it."""
        self.scale = float(state.get("scale", self.scale))
        self.finite_steps = int(state.get("finite_steps", 0))
        self.patience = int(state.get("patience", self.hysteresis))
