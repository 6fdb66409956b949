"""Schedules of learning rate and weight decay, and the learning rate of each kind of parameter.

A checkpoint stores its schedules. A run that resumes from it must have the same ones, or choose:

    --use-checkpoint-opt-param-scheduler   those of the checkpoint
    --override-opt-param-scheduler         those of this run
    neither                                a difference is an error

The kind of a parameter decides its learning rate: --decoupled-lr applies to the embedding and the output layer, and muP
(`model.py`) scales kinds differently.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

from megatrain.config.schema.lr_decay import LR_STYLES, LrDecay
from megatrain.config.schema.model import ModelConfig
from megatrain.config.schema.optimizer import OptimizerConfig, WeightDecayStyle
from megatrain.config.schema.tree import flag_of
from megatrain.config.user_function import UserFunction

_NAMES: Final = {
    "lr_warmup_samples": "samples of warm-up (--lr-warmup-iters, --lr-warmup-samples, --lr-warmup-fraction)",
    "lr_decay_samples": "samples until the decay ends (--lr-decay-iters, --lr-decay-samples, the end of training)",
    "lr_wsd_decay_samples": "samples of the WSD decay (--lr-wsd-decay-iters, --lr-wsd-decay-samples)",
    "weight_decay_incr_samples": "samples until weight decay stops increasing (the end of training)",
}
"""Names of values that are not those of a flag."""


@dataclass(frozen=True, kw_only=True)
class ScheduleValues(LrDecay):
    """Settings of the schedules. Lengths are numbers of samples."""

    lr: float
    min_lr: float
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None
    lr_warmup_init: float = 0.0
    lr_warmup_samples: float
    lr_decay_samples: int
    lr_decay_digest: str | None = None
    """Digest of the file with the user's own schedule."""
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_incr_style: WeightDecayStyle
    weight_decay_incr_samples: int

    def __str__(self) -> str:
        decay = self.start_weight_decay
        increase = "" if decay == self.end_weight_decay else f" to {self.end_weight_decay:g}"
        end = f" at sample {self.lr_decay_samples}" if self.style.decays else ""
        values = ((name, getattr(self, name, None)) for name in self.style.settings)
        own = "".join(f", {flag_of(name)} {value}" for name, value in values if value is not None)
        return f"{self.lr_decay_style}, lr {self.lr:g} to {self.min_lr:g}{end}{own}, weight decay {decay:g}{increase}"

    @property
    def function(self) -> UserFunction | None:
        """The user's own schedule; None: the style is one of `LR_STYLES`."""
        if self.lr_decay_style in LR_STYLES:
            return None
        return UserFunction.parse(self.lr_decay_style, "--lr-decay-style")

    def to_dict(self) -> dict[str, Any]:
        """Return the values that a checkpoint stores."""
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(ScheduleValues)}

    def changes(self, stored: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        """Return flag, stored value and current value of each difference that has an effect. A value that the checkpoint lacks counts as equal."""
        return [
            (_NAMES.get(name, flag_of(name)), stored[name], now)
            for name, now in self.to_dict().items()
            if name in stored and stored[name] != now and self._has_effect(name)
        ]

    def _has_effect(self, name: str) -> bool:
        match name:
            case "lr_warmup_init":
                return self.lr_warmup_samples > 0
            case "lr_decay_samples" | "min_lr" | "decoupled_min_lr":
                return self.style.decays
            case "weight_decay_incr_samples":
                return self.weight_decay_incr_style != "constant"
            case "lr_decay_digest":  # compared before the file is run
                return False
            case "start_weight_decay":  # equals the end value, which is reported
                return self.weight_decay_incr_style != "constant"
        return self.reads(name)


ParamKind = Literal["matrix", "vector", "embedding", "positions", "output", "scale"]
"""Kind of a parameter: a matrix of a layer, a bias or norm, the token embedding (and a tied output layer), the learned
position embedding, an untied output layer; a scale of --qat, which is not trained."""

_KINDS: Final[tuple[ParamKind, ...]] = get_args(ParamKind)
_HIDDEN: Final = ("matrix", "output")
_DECOUPLED: Final = ("embedding", "output")


@dataclass(frozen=True, kw_only=True)
class LRGroup:
    """Learning rate of some kinds of parameters."""

    kinds: tuple[ParamKind, ...]
    lr: float
    """Learning rate at the end of warm-up."""
    min_lr: float
    """Learning rate at the end of the decay."""
    eps_scale: float = 1.0
    """Factor of Adam's eps."""

    @property
    def rates(self) -> tuple[float, float, float]:
        return self.lr, self.min_lr, self.eps_scale


@dataclass(frozen=True)
class LRGroups:
    """Learning rates of all parameters: each kind is in one group."""

    groups: tuple[LRGroup, ...]

    def of(self, kind: ParamKind) -> LRGroup:
        """Return the group of a kind."""
        (found,) = (group for group in self.groups if kind in group.kinds)
        return found

    def __str__(self) -> str:
        return "; ".join(f"{_in_words(group.kinds)}: {group.lr:g}" for group in self.groups)


def _in_words(kinds: tuple[ParamKind, ...]) -> str:
    return "all" if kinds == _KINDS else ", ".join(kind for kind in kinds if kind != "scale")


def group_learning_rates(
    model: ModelConfig, optimizer: OptimizerConfig, schedule: ScheduleValues
) -> tuple[LRGroups, str]:
    """Return the learning rate of each kind of parameter, and the reason."""
    base = LRGroup(kinds=(), lr=schedule.lr, min_lr=schedule.min_lr)
    of_kind = {kind: _scaled(base, model, optimizer.optimizer, kind) for kind in _KINDS}
    reasons = []
    if model.use_mup and model.mup_width_mult != 1:
        scaling = {
            "sgd": "muP: SGD of vectors and tables with lr * ",
            "adam": "muP: Adam of matrices with lr and eps / ",
            "lion": "muP: Lion of matrices with lr / ",
            "adaptive_muon": "muP: matrices with lr / ",
            "soap": "muP: matrices with lr / ",  # a conflict
            "muon": "muP: Adam of an output layer with lr / ",
        }[optimizer.optimizer]
        reasons.append(f"{scaling}width multiplier {model.mup_width_mult:g}")
    if schedule.decoupled_lr is not None:
        reasons.append(f"embedding and output layer have --decoupled-lr {schedule.decoupled_lr:g}")
        floor = schedule.min_lr if schedule.decoupled_min_lr is None else schedule.decoupled_min_lr
        for kind in _DECOUPLED:
            of_kind[kind] = replace(of_kind[kind], lr=schedule.decoupled_lr, min_lr=floor)
    groups: dict[tuple[float, float, float], LRGroup] = {}
    for kind, group in of_kind.items():
        known = groups.get(group.rates, group)
        groups[group.rates] = replace(known, kinds=(*known.kinds, kind))
    return LRGroups(tuple(groups.values())), "; ".join(reasons) or "--lr"


def _scaled(base: LRGroup, model: ModelConfig, optimizer: str, kind: ParamKind) -> LRGroup:
    m = model.mup_width_mult if model.use_mup else 1.0
    if optimizer == "sgd":
        return base if kind in _HIDDEN else replace(base, lr=base.lr * m, min_lr=base.min_lr * m)
    if kind not in _HIDDEN or (optimizer == "muon" and kind == "matrix"):
        return base  # Muon scales its updates by shape
    if optimizer == "muon":
        return replace(base, lr=base.lr / m, min_lr=base.min_lr / m)
    return replace(base, lr=base.lr / m, min_lr=base.min_lr / m, eps_scale=1 / m)
