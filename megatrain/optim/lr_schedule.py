"""What moves over a run, as functions of the samples consumed before the step: learning hyperparams and weight decay.

    init ── warm-up ──> peak ── decay ──> floor           start ── increase ──> end
          learning rate (of each group)                         weight decay

The rules are Megatron-LM's, so that its runs continue alike: the first iteration runs at `init`, and a constant rate
stays at `peak` after the decay's end. A step that was skipped does not count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megatrain.config.derive.lr_schedule import ParamKind

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
WsdStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
IncreaseStyle = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class LrSchedule:
    """Counted in samples."""

    style: DecayStyle
    peak: float
    floor: float
    init: float
    warmup_samples: float
    decay_samples: float
    """Where the decay ends."""
    wsd_style: WsdStyle = "exponential"
    wsd_samples: float | None = None
    """With WSD (warm-up, stable, decay): how long the decay takes."""

    def at(self, samples: int) -> float:
        """Rate of the step that starts after `samples` samples."""
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            return self.init + (self.peak - self.init) * samples / self.warmup_samples
        if self.style == "constant":
            return self.peak
        if samples > self.decay_samples:
            return self.floor
        if self.style == "inverse-square-root":
            rate = self.peak * math.sqrt(max(self.warmup_samples, 1)) / math.sqrt(max(samples, 1))
            return max(self.floor, rate)
        return self.floor + self._share(samples) * (self.peak - self.floor)

    def _share(self, samples: int) -> float:
        """How much of the way from floor to peak is left."""
        if self.style == "WSD":
            assert self.wsd_samples is not None
            start = self.decay_samples - self.wsd_samples
            return (
                1.0 if samples <= start else _wsd_share((samples - start) / self.wsd_samples, self.wsd_style)
            )
        ratio = (samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        return 1.0 - ratio if self.style == "linear" else _half_cosine(ratio)


@dataclass(frozen=True, kw_only=True)
class WeightDecaySchedule:
    """Counted in samples. It may increase over a run."""

    style: IncreaseStyle
    start: float
    end: float
    increase_samples: float

    def at(self, samples: int) -> float:
        """Weight decay of the step that starts after `samples` samples."""
        if self.style == "constant" or samples > self.increase_samples:
            return self.end
        ratio = samples / self.increase_samples
        share = ratio if self.style == "linear" else _half_cosine(1.0 - ratio)
        return self.start + share * (self.end - self.start)


@dataclass(frozen=True, kw_only=True)
class Hyperparams:
    """The numbers of one step that schedules give."""

    lr: float
    """As logs show it."""
    weight_decay: float
    """Of the parameters that decay."""
    by_kind: Mapping[ParamKind, float] = field(default_factory=dict)
    """Of kinds of parameters with a rate of their own."""
    eps_scales: Mapping[ParamKind, float] = field(default_factory=dict)
    """What Adam's eps is multiplied with, for kinds where this is not 1."""

    def of(self, kind: ParamKind) -> float:
        """Learning rate of a kind of parameters."""
        return self.by_kind.get(kind, self.lr)

    def eps_scale_of(self, kind: ParamKind) -> float:
        """What Adam's eps is multiplied with for a kind of parameters."""
        return self.eps_scales.get(kind, 1.0)


@dataclass(frozen=True, kw_only=True)
class HyperparamSchedules:
    """All that moves over a run."""

    lr: LrSchedule
    weight_decay: WeightDecaySchedule
    by_kind: Mapping[ParamKind, LrSchedule] = field(default_factory=dict)
    """Of kinds of parameters with a rate of their own."""
    eps_scales: Mapping[ParamKind, float] = field(default_factory=dict)
    """What Adam's eps is multiplied with, for kinds where this is not 1; it does not move."""

    def at(self, samples: int) -> Hyperparams:
        """The hyperparams of the step that starts after `samples` samples of steps that were made."""
        return Hyperparams(
            lr=self.lr.at(samples),
            weight_decay=self.weight_decay.at(samples),
            by_kind={kind: rate.at(samples) for kind, rate in self.by_kind.items()},
            eps_scales=self.eps_scales,
        )


def _half_cosine(ratio: float) -> float:
    """From 1 at 0 to 0 at 1."""
    return 0.5 * (math.cos(math.pi * ratio) + 1.0)


def _wsd_share(ratio: float, style: WsdStyle) -> float:
    match style:
        case "linear":
            return 1.0 - ratio
        case "cosine":
            return _half_cosine(ratio)
        case "exponential":
            return 2.0 * math.pow(0.5, ratio) - 1.0
        case "minus_sqrt":
            return 1.0 - math.sqrt(ratio)
