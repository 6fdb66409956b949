"""The learning-rate schedule of a run and the learning rate of each kind of parameter."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

from megatrain.config.schema.model import ModelConfig
from megatrain.config.schema.optimizer import OptimizerConfig

_NAMES: Final = {
    "lr": "--lr",
    "min_lr": "--min-lr",
    "decoupled_lr": "--decoupled-lr",
    "decoupled_min_lr": "--decoupled-min-lr",
    "lr_warmup_init": "--lr-warmup-init",
    "lr_decay_style": "--lr-decay-style",
    "lr_warmup_samples": "samples of warm-up (--lr-warmup-iters, --lr-warmup-samples, --lr-warmup-fraction)",
    "lr_decay_samples": "samples until the decay ends (--lr-decay-iters, --lr-decay-samples, the end of training)",
    "lr_wsd_decay_style": "--lr-wsd-decay-style",
    "lr_wsd_decay_samples": "samples of the WSD decay (--lr-wsd-decay-iters, --lr-wsd-decay-samples)",
    "start_weight_decay": "--start-weight-decay",
    "end_weight_decay": "--end-weight-decay",
    "weight_decay_incr_style": "--weight-decay-incr-style",
    "weight_decay_incr_samples": "samples until weight decay ends to increase (the end of training)",
}


@dataclass(frozen=True, kw_only=True)
class ScheduleValues:
    """Counted in samples."""

    lr: float
    min_lr: float
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None
    lr_warmup_init: float = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
    lr_warmup_samples: float
    lr_decay_samples: int
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"]
    lr_wsd_decay_samples: int | None
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_incr_style: Literal["constant", "linear", "cosine"]
    weight_decay_incr_samples: int

    def __str__(self) -> str:
        decay = self.start_weight_decay
        increase = "" if decay == self.end_weight_decay else f" to {self.end_weight_decay:g}"
        return f"{self.lr_decay_style}, lr {self.lr:g} to {self.min_lr:g}, weight decay {decay:g}{increase}"

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return dataclasses.asdict(self)

    def changes(self, stored: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        """Flag, stored value and own value of what differs and plays a role. What is not stored does not differ."""
        own = self.to_dict()
        return [
            (said, stored[name], own[name])
            for name, said in _NAMES.items()
            if name in stored and stored[name] != own[name] and self._matters(name)
        ]

    def _matters(self, name: str) -> bool:
        match name:
            case "lr_wsd_decay_style" | "lr_wsd_decay_samples":
                return self.lr_decay_style == "WSD"
            case "lr_warmup_init":
                return self.lr_warmup_samples > 0
            case "lr_decay_samples" | "min_lr" | "decoupled_min_lr":
                return self.lr_decay_style != "constant"
            case "weight_decay_incr_samples":
                return self.weight_decay_incr_style != "constant"
            case "start_weight_decay":  # equals the end: one word about it is enough
                return self.weight_decay_incr_style != "constant"
        return True


ParamKind = Literal["matrix", "vector", "embedding", "positions", "output"]
"""What a parameter is to the learning rate: a matrix of a layer, a bias or norm, the table of tokens (and the output
layer where they are tied), the table of positions, an output layer of its own."""

_KINDS: Final[tuple[ParamKind, ...]] = get_args(ParamKind)
_HIDDEN: Final = ("matrix", "output")
_DECOUPLED: Final = ("embedding", "output")


@dataclass(frozen=True, kw_only=True)
class LRGroup:
    """The learning rate of some kinds of parameters."""

    kinds: tuple[ParamKind, ...]
    lr: float
    """Once warm-up ends."""
    min_lr: float
    """Once the decay has ended."""
    eps_scale: float = 1.0
    """What Adam's eps is multiplied with."""

    @property
    def rates(self) -> tuple[float, float, float]:
        return self.lr, self.min_lr, self.eps_scale


@dataclass(frozen=True)
class LRGroups:
    """Every kind of parameter is in one of these."""

    groups: tuple[LRGroup, ...]

    def of(self, kind: ParamKind) -> LRGroup:
        """The group of a kind."""
        (found,) = (group for group in self.groups if kind in group.kinds)
        return found

    def __str__(self) -> str:
        names = {_KINDS: "all"}
        return "; ".join(
            f"{names.get(group.kinds, ', '.join(group.kinds))}: {group.lr:g}" for group in self.groups
        )


def lr_groups(
    model: ModelConfig, optimizer: OptimizerConfig, schedule: ScheduleValues
) -> tuple[LRGroups, str]:
    """How fast each kind of parameter moves, and why."""
    base = LRGroup(kinds=(), lr=schedule.lr, min_lr=schedule.min_lr)
    of_kind = {kind: _scaled(base, model, optimizer.optimizer, kind) for kind in _KINDS}
    reasons = []
    if model.use_mup and model.mup_width_mult != 1:
        said = {
            "sgd": "muP: SGD of vectors and tables at lr * ",
            "adam": "muP: Adam of matrices at lr and eps / ",
            "muon": "muP: Adam of an output layer at lr / ",
        }[optimizer.optimizer]
        reasons.append(f"{said}width multiplier {model.mup_width_mult:g}")
    if schedule.decoupled_lr is not None:
        reasons.append(f"embedding and output layer by --decoupled-lr {schedule.decoupled_lr:g}")
        floor = schedule.min_lr if schedule.decoupled_min_lr is None else schedule.decoupled_min_lr
        for kind in _DECOUPLED:
            of_kind[kind] = replace(of_kind[kind], lr=schedule.decoupled_lr, min_lr=floor)
    joined: dict[tuple[float, float, float], LRGroup] = {}
    for kind, group in of_kind.items():
        known = joined.get(group.rates, group)
        joined[group.rates] = replace(known, kinds=(*known.kinds, kind))
    return LRGroups(tuple(joined.values())), "; ".join(reasons) or "--lr"


def _scaled(base: LRGroup, model: ModelConfig, optimizer: str, kind: ParamKind) -> LRGroup:
    m = model.mup_width_mult if model.use_mup else 1.0
    if optimizer == "sgd":
        return base if kind in _HIDDEN else replace(base, lr=base.lr * m, min_lr=base.min_lr * m)
    if kind not in _HIDDEN or (optimizer == "muon" and kind == "matrix"):
        return base  # the steps of Muon have a scale of their own, by shape
    if optimizer == "muon":
        return replace(base, lr=base.lr / m, min_lr=base.min_lr / m)
    return replace(base, lr=base.lr / m, min_lr=base.min_lr / m, eps_scale=1 / m)
