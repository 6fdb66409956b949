"""Learning rates and weight decay of each step, as functions of the samples consumed before it.

    init ── warm-up ──> lr ── decay ──> min_lr           start ── increase ──> end
                learning rate                                   weight decay

The rules are Megatron-LM's, so that its runs continue unchanged: the first iteration runs at `lr_warmup_init`, and a
constant learning rate stays at `lr` after the end of the decay. Skipped steps do not count.

`config/schema/lr_decay.py` describes the schedules; docs/contributing.md lists the places of a new one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, assert_never

from megatrain.config.derive.lr_schedule import ParamKind, ScheduleValues
from megatrain.config.errors import ConfigError
from megatrain.config.schema.lr_decay import WsdDecayStyle
from megatrain.config.schema.optimizer import WeightDecayStyle
from megatrain.config.user_function import UserFunction


@dataclass(frozen=True, kw_only=True)
class LrSchedule(ScheduleValues):
    """Learning-rate schedule: a linear warm-up, then a formula. Counted in samples."""

    formula: LrFormula

    @classmethod
    def of(cls, values: ScheduleValues) -> LrSchedule:
        """Return the schedule with these values.

        Raises:
            ConfigError: the user's own schedule cannot be loaded, or its file differs from the plan's.
        """
        function = values.function
        if function is None:
            return cls(**values.to_dict(), formula=LR_FORMULAS[values.lr_decay_style])
        formula = _checked(function, function.load(values.lr_decay_digest))
        schedule = cls(**values.to_dict(), formula=formula)
        schedule.trial()  # errors show at the start, not after days
        return schedule

    def trial(self) -> dict[int, float]:
        """Return some of the learning rates, by samples."""
        warmup, end = int(self.lr_warmup_samples), self.lr_decay_samples
        return {samples: self.at(samples) for samples in (0, warmup + 1, (warmup + end) // 2, end)}

    def at(self, samples: int) -> float:
        """Return the learning rate of the step that starts after `samples` samples."""
        if self.lr_warmup_samples > 0 and samples <= self.lr_warmup_samples:
            return self.lr_warmup_init + (self.lr - self.lr_warmup_init) * samples / self.lr_warmup_samples
        if self.style.decays and samples > self.lr_decay_samples:
            return self.min_lr
        return self.formula(samples, self)

    def progress(self, samples: int) -> float:
        """Return the part of the decay that has passed: 0 at the end of warm-up, 1 at the end of the decay."""
        return (samples - self.lr_warmup_samples) / (self.lr_decay_samples - self.lr_warmup_samples)

    def between(self, fraction: float) -> float:
        """Return `min_lr` for 0, `lr` for 1, and the straight line between them."""
        return self.min_lr + fraction * (self.lr - self.min_lr)


LrFormula = Callable[[int, LrSchedule], float]
"""A schedule between warm-up and the end of the decay: the learning rate of the step that starts after these samples."""


def constant(samples: int, schedule: LrSchedule) -> float:  # noqa: ARG001
    return schedule.lr


def linear(samples: int, schedule: LrSchedule) -> float:
    return schedule.between(1.0 - schedule.progress(samples))


def cosine(samples: int, schedule: LrSchedule) -> float:
    return schedule.between(_half_cosine(schedule.progress(samples)))


def inverse_square_root(samples: int, schedule: LrSchedule) -> float:
    lr = schedule.lr * math.sqrt(max(schedule.lr_warmup_samples, 1)) / math.sqrt(max(samples, 1))
    return max(schedule.min_lr, lr)


def wsd(samples: int, schedule: LrSchedule) -> float:
    """Warm-up, stable, decay."""
    length = schedule.lr_wsd_decay_samples
    assert length is not None, "a rule asks for it"
    passed = samples - (schedule.lr_decay_samples - length)
    style = schedule.lr_wsd_decay_style
    return schedule.between(1.0 if passed <= 0 else _final_decay(passed / length, style))


LR_FORMULAS: Final[Mapping[str, LrFormula]] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "inverse-square-root": inverse_square_root,
    "WSD": wsd,
}
"""Formulas of `LR_STYLES`."""


def _checked(function: UserFunction, formula: LrFormula) -> LrFormula:
    """Check what the user's own schedule returns. Raises ConfigError."""

    def checked(samples: int, schedule: LrSchedule) -> float:
        try:
            returned = formula(samples, schedule)
        except Exception as error:
            raise function.failure(error) from error
        try:
            rate = float(returned)
        except (TypeError, ValueError):
            rate = math.nan
        if not (math.isfinite(rate) and rate >= 0):
            raise ConfigError(
                f"{function.flag} {function} returned {returned!r} after {samples} samples",
                fix="return a learning rate: a finite number, at least 0",
            )
        return rate

    return checked


def _half_cosine(ratio: float) -> float:
    """Return a half cosine: 1 at ratio 0, 0 at ratio 1."""
    return 0.5 * (math.cos(math.pi * ratio) + 1.0)


def _final_decay(ratio: float, style: WsdDecayStyle) -> float:
    match style:
        case "linear":
            return 1.0 - ratio
        case "cosine":
            return _half_cosine(ratio)
        case "exponential":
            return 2.0 * math.pow(0.5, ratio) - 1.0
        case "minus_sqrt":
            return 1.0 - math.sqrt(ratio)
        case _:
            assert_never(style)


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
