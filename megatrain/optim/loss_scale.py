"""Loss scaling: the factor on the loss that keeps fp16 gradients within the range of fp16.

    loss * scale -> backward -> gradients * scale -> norm and update divide by scale
    not finite: the step is skipped; from the `hysteresis`-th such step on, each halves the scale
    finite:     a window of consecutive such steps doubles the scale and restores the patience
    not finite for many consecutive steps at a scale that cannot shrink: the run cannot recover

Source: Micikevicius et al., arXiv:1710.03740. The rule is Megatron-LM's: halving the scale does not restore the patience.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_GROWTH, _BACKOFF = 2.0, 0.5
MOST_STUCK_STEPS: Final = 10
"""Consecutive steps that are skipped at a scale that cannot shrink; further steps would change only the samples."""


@dataclass
class LossScaler:
    """The factor on the loss of each step, and the rule for steps that are not finite. This one is constant."""

    scale: float = 1.0
    """--loss-scale, or 1 if the dtype needs no scaling."""
    skips_gradients: bool = False
    """True: gradients that overflow are not an error, since the factor may be too large for some steps."""
    skips_all: bool = False
    """True: no step that is not finite is an error."""
    stuck_steps: int = field(default=0, init=False)
    """Consecutive steps, up to the last one, that were not finite at a scale that cannot shrink."""

    @property
    def may_skip(self) -> bool:
        """True if steps may be skipped: the next step then depends on the result of this one."""
        return self.skips_gradients or self.skips_all

    def skips(self, lm_loss: float) -> bool:
        """Return True if a step whose loss or gradients are not finite is skipped, False if it is an error."""
        is_stuck = self.stuck_steps >= MOST_STUCK_STEPS
        return self.skips_all or (self.skips_gradients and math.isfinite(lm_loss) and not is_stuck)

    def update(self, *, is_finite: bool) -> None:
        """Update the scale by the result of a step."""
        self.stuck_steps = 0 if is_finite else self.stuck_steps + 1

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint; a run in another dtype has stored none of the values."""


@dataclass(kw_only=True)
class DynamicLossScaler(LossScaler):
    """A factor that adapts to the largest value at which gradients stay finite."""

    scale: float
    minimum: float
    window: float
    """Consecutive finite steps until the scale grows."""
    hysteresis: int
    """Non-finite steps until the scale shrinks."""
    skips_gradients: bool = True

    def __post_init__(self) -> None:
        self.finite_steps, self.patience = 0, self.hysteresis

    def skips(self, lm_loss: float) -> bool:  # noqa: ARG002 (a loss may overflow too)
        """See `LossScaler`; `skips_all`: the run continues although it cannot recover."""
        return self.skips_all or self.stuck_steps < MOST_STUCK_STEPS

    def update(self, *, is_finite: bool) -> None:
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
        return {"scale": self.scale, "finite_steps": self.finite_steps, "patience": self.patience}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.scale = float(state.get("scale", self.scale))
        self.finite_steps = int(state.get("finite_steps", 0))
        self.patience = int(state.get("patience", self.hysteresis))
