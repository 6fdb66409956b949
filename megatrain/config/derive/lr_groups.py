"""Which parameters move at which learning rate.

What a parameter is decides it: --decoupled-lr is for the embedding and the output layer, and muP (`mup.py`) scales
kinds apart.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from megatrain.config.derive.schedule_values import ScheduleValues
from megatrain.config.schema.model import ModelConfig
from megatrain.config.schema.optimizer import OptimizerConfig

ParamKind = Literal["matrix", "vector", "embedding", "positions", "output"]
"""What a parameter is to the learning rate: a matrix of a layer, a bias or norm, the table of tokens (and the output
layer where they are tied), the table of positions, an output layer of its own."""

_KINDS: Final[tuple[ParamKind, ...]] = get_args(ParamKind)
_HIDDEN: Final = ("matrix", "output")
_DECOUPLED: Final = ("embedding", "output")


@dataclass(frozen=True, kw_only=True)
class RateGroup:
    """The learning rate of some kinds of parameters."""

    kinds: tuple[ParamKind, ...]
    lr: float
    """Once warm-up ends."""
    min_lr: float
    """Once the decay has ended."""
    eps_share: float = 1.0
    """What Adam's eps is multiplied with."""

    @property
    def rates(self) -> tuple[float, float, float]:
        return self.lr, self.min_lr, self.eps_share


@dataclass(frozen=True)
class RateGroups:
    """Every kind of parameter is in one of these."""

    groups: tuple[RateGroup, ...]

    def of(self, kind: ParamKind) -> RateGroup:
        """The group of a kind."""
        (found,) = (group for group in self.groups if kind in group.kinds)
        return found

    def __str__(self) -> str:
        names = {_KINDS: "all"}
        return "; ".join(
            f"{names.get(group.kinds, ', '.join(group.kinds))}: {group.lr:g}" for group in self.groups
        )


def rate_groups(
    model: ModelConfig, optimizer: OptimizerConfig, schedule: ScheduleValues
) -> tuple[RateGroups, str]:
    """How fast each kind of parameter moves, and why."""
    base = RateGroup(kinds=(), lr=schedule.lr, min_lr=schedule.min_lr)
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
    joined: dict[tuple[float, float, float], RateGroup] = {}
    for kind, group in of_kind.items():
        known = joined.get(group.rates, group)
        joined[group.rates] = replace(known, kinds=(*known.kinds, kind))
    return RateGroups(tuple(joined.values())), "; ".join(reasons) or "--lr"


def _scaled(base: RateGroup, model: ModelConfig, optimizer: str, kind: ParamKind) -> RateGroup:
    m = model.mup_width_mult if model.use_mup else 1.0
    if optimizer == "sgd":
        return base if kind in _HIDDEN else replace(base, lr=base.lr * m, min_lr=base.min_lr * m)
    if kind not in _HIDDEN or (optimizer == "muon" and kind == "matrix"):
        return base  # the steps of Muon have a scale of their own, by shape
    if optimizer == "muon":
        return replace(base, lr=base.lr / m, min_lr=base.min_lr / m)
    return replace(base, lr=base.lr / m, min_lr=base.min_lr / m, eps_share=1 / m)
