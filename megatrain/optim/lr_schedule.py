"""Learning-rate and weight-decay schedules: hyperparameters of a step as functions of the samples consumed before it.

    init ── warm-up ──> peak ── decay ──> floor           start ── increase ──> end
          learning rate (per parameter kind)                    weight decay

The rules are Megatron-LM's, so that its runs continue unchanged: the first iteration runs at `init`, and a constant
learning rate stays at `peak` after the end of the decay. Skipped steps do not count.

docs/contributing.md lists the places of a new schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

from megatrain.config.derive.lr_schedule import ParamKind
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


@dataclass(frozen=True, kw_only=True)
class Hyperparams:
    """Scheduled hyperparameters of one step."""

    lr: float
    """Learning rate that logs show."""
    weight_decay: float
    """Weight decay of the parameters that decay."""
    lr_by_kind: Mapping[ParamKind, float] = field(default_factory=dict)
    """Learning rates of parameter kinds that differ from `lr`."""
    eps_scales: Mapping[ParamKind, float] = field(default_factory=dict)
    """Factors on Adam's eps of parameter kinds for which it is not 1."""

    def lr_of(self, kind: ParamKind) -> float:
        """Return the learning rate of a kind of parameters."""
        return self.lr_by_kind.get(kind, self.lr)

    def eps_scale_of(self, kind: ParamKind) -> float:
        """Return the factor on Adam's eps of a kind of parameters."""
        return self.eps_scales.get(kind, 1.0)


@dataclass(frozen=True, kw_only=True)
class HyperparamSchedules:
    """All scheduled hyperparameters of a run."""

    lr: LrSchedule
    weight_decay: WeightDecaySchedule
    lr_by_kind: Mapping[ParamKind, LrSchedule] = field(default_factory=dict)
    """Schedules of parameter kinds that differ from `lr`."""
    eps_scales: Mapping[ParamKind, float] = field(default_factory=dict)
    """Constant factors on Adam's eps of parameter kinds for which it is not 1."""

    def at(self, samples: int) -> Hyperparams:
        """Return the hyperparameters of the step that starts after `samples` samples of steps that were not skipped."""
        return Hyperparams(
            lr=self.lr.at(samples),
            weight_decay=self.weight_decay.at(samples),
            lr_by_kind={kind: schedule.at(samples) for kind, schedule in self.lr_by_kind.items()},
            eps_scales=self.eps_scales,
        )


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
