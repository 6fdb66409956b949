"""Hyperparameters of a step, for each kind of parameter, from the schedules of learning rate and weight decay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatrain.config.derive.lr_schedule import ParamKind
from megatrain.config.derive.schedule_formulas import LrSchedule, WeightDecaySchedule


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
