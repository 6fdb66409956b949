"""Formulas of the learning-rate and weight-decay schedules, as functions of the samples consumed before a step.

    init ── warm-up ──> peak ── decay ──> floor           start ── increase ──> end
                learning rate                                    weight decay

The rules are Megatron-LM's, so that its runs continue unchanged: the first iteration runs at `init`, and a constant
learning rate stays at `peak` after the end of the decay. Skipped steps do not count.

docs/contributing.md lists the places of a new schedule.
"""

import math
from dataclasses import dataclass
from typing import assert_never

from megatrain.config.schema.optimizer import LrDecayStyle, WeightDecayStyle, WsdDecayStyle


@dataclass(frozen=True, kw_only=True)
class LrSchedule:
    """Learning-rate schedule: a linear warm-up, then a decay. Counted in samples."""

    style: LrDecayStyle
    peak: float
    floor: float
    init: float
    warmup_samples: float
    decay_samples: float
    """End of the decay, counted from the start of the run."""
    wsd_style: WsdDecayStyle = "exponential"
    wsd_samples: float | None = None
    """Length of the decay with WSD (warm-up, stable, decay)."""

    def at(self, samples: int) -> float:
        """Return the learning rate of the step that starts after `samples` samples."""
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            return self.init + (self.peak - self.init) * samples / self.warmup_samples
        if self.style == "constant":
            return self.peak
        if samples > self.decay_samples:
            return self.floor
        ratio = (samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        match self.style:
            case "linear":
                factor = 1.0 - ratio
            case "cosine":
                factor = _half_cosine(ratio)
            case "WSD":
                factor = self._wsd_factor(samples)
            case "inverse-square-root":
                lr = self.peak * math.sqrt(max(self.warmup_samples, 1)) / math.sqrt(max(samples, 1))
                return max(self.floor, lr)
            case _:
                assert_never(self.style)
        return self.floor + factor * (self.peak - self.floor)

    def _wsd_factor(self, samples: int) -> float:
        """Return the remaining fraction of peak - floor with WSD."""
        assert self.wsd_samples is not None
        start = self.decay_samples - self.wsd_samples
        return 1.0 if samples <= start else _wsd_factor((samples - start) / self.wsd_samples, self.wsd_style)


@dataclass(frozen=True, kw_only=True)
class WeightDecaySchedule:
    """Weight decay that is constant or increases over a run. Counted in samples."""

    style: WeightDecayStyle
    start: float
    end: float
    increase_samples: float

    def at(self, samples: int) -> float:
        """Return the weight decay of the step that starts after `samples` samples."""
        if self.style == "constant" or samples > self.increase_samples:
            return self.end
        ratio = samples / self.increase_samples
        factor = ratio if self.style == "linear" else _half_cosine(1.0 - ratio)
        return self.start + factor * (self.end - self.start)


def _half_cosine(ratio: float) -> float:
    """Return a half cosine: 1 at ratio 0, 0 at ratio 1."""
    return 0.5 * (math.cos(math.pi * ratio) + 1.0)


def _wsd_factor(ratio: float, style: WsdDecayStyle) -> float:
    match style:
        case "linear":
            return 1.0 - ratio
        case "cosine":
            return _half_cosine(ratio)
        case "exponential":
            return 2.0 * math.pow(0.5, ratio) - 1.0
        case "minus_sqrt":
            return 1.0 - math.sqrt(ratio)
