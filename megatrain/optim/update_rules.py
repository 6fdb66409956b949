"""The update rules: what an optimizer keeps for each element, and how a flat shard of weights moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatrain.kernels.optimizer.adamw import AdamwStep, adamw
from megatrain.kernels.optimizer.sgd import sgd
from megatrain.kernels.optimizer.shard_update import FlatUpdate


class UpdateRule(Protocol):
    """An optimizer's mathematics; it holds no state itself."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of what is kept for each element beside the master weight, as checkpoints have them."""

    def update(self, shard: FlatUpdate, kept: Mapping[str, Tensor], step: int) -> None:
        """Update a shard, and what is kept for it, in place. `step` counts from 1."""


@dataclass(frozen=True, kw_only=True)
class AdamwRule:
    """Adam with decoupled weight decay."""

    beta1: float
    beta2: float
    eps: float

    kinds = ("exp_avg", "exp_avg_sq")

    def update(self, shard: FlatUpdate, kept: Mapping[str, Tensor], step: int) -> None:
        """See `UpdateRule`."""
        numbers = AdamwStep(beta1=self.beta1, beta2=self.beta2, eps=self.eps, step=step)
        adamw(shard, kept["exp_avg"], kept["exp_avg_sq"], numbers)


@dataclass(frozen=True, kw_only=True)
class SgdRule:
    """Gradient descent with momentum."""

    momentum: float

    kinds = ("momentum_buffer",)

    def update(self, shard: FlatUpdate, kept: Mapping[str, Tensor], step: int) -> None:  # noqa: ARG002 (all steps are alike)
        """See `UpdateRule`."""
        sgd(shard, kept["momentum_buffer"], momentum=self.momentum)
