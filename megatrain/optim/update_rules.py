"""Element-wise update rules: the state that an optimizer keeps per element, and the update of a flat shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from megatrain.kernels.optimizer.adamw import AdamwStep, adamw
from megatrain.kernels.optimizer.lion import lion
from megatrain.kernels.optimizer.sgd import sgd
from megatrain.kernels.optimizer.shard_update import FlatUpdate

EMA: Final = "ema"
"""The kind of state that is the exponential moving average of master weights, by its name in checkpoints."""


class UpdateRule(Protocol):
    """The mathematics of an optimizer; holds no state itself."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the state per element in addition to the master weight, as in checkpoints."""

    def update(self, shard: FlatUpdate, moments: Mapping[str, Tensor], step: int) -> None:
        """Update a shard and its moments in place. `step` counts from 1."""


@dataclass(frozen=True, kw_only=True)
class AdamwRule:
    """Adam with decoupled weight decay. Implements `UpdateRule`."""

    beta1: float
    beta2: float
    eps: float

    kinds = ("exp_avg", "exp_avg_sq")

    def update(self, shard: FlatUpdate, moments: Mapping[str, Tensor], step: int) -> None:
        beta1, beta2 = (_rounded(beta, shard.master.dtype) for beta in (self.beta1, self.beta2))
        numbers = AdamwStep(beta1=beta1, beta2=beta2, eps=self.eps, step=step)
        adamw(shard, moments["exp_avg"], moments["exp_avg_sq"], numbers)


def _rounded(beta: float, dtype: torch.dtype) -> float:
    """Return a decay as `dtype` holds it, so that it and its difference to 1 sum to 1: 0.999 has an error of 1.3e-8 in fp32.

    Without, second moments differ by 1.3e-5 from Transformer Engine's Adam, which Megatron-LM's checkpoints hold.
    """
    return torch.tensor(beta, dtype=dtype).item()


@dataclass(frozen=True, kw_only=True)
class SgdRule:
    """Stochastic gradient descent with momentum. Implements `UpdateRule`."""

    momentum: float

    kinds = ("momentum_buffer",)

    def update(self, shard: FlatUpdate, moments: Mapping[str, Tensor], step: int) -> None:  # noqa: ARG002 (no step count)
        sgd(shard, moments["momentum_buffer"], momentum=self.momentum)


@dataclass(frozen=True, kw_only=True)
class LionRule:
    """Steps by the sign of a momentum, with decoupled weight decay. Implements `UpdateRule`."""

    beta1: float
    beta2: float

    kinds = ("exp_avg",)

    def update(self, shard: FlatUpdate, moments: Mapping[str, Tensor], step: int) -> None:  # noqa: ARG002 (no step count)
        lion(shard, moments["exp_avg"], beta1=self.beta1, beta2=self.beta2)


def update_average(shard: FlatUpdate, average: Tensor, decay: float, step: int) -> None:
    """Move an exponential moving average towards master weights that are updated; that of step 1 is the weights themselves.

    As `torch.optim.swa_utils.get_ema_multi_avg_fn` does. A step that is not finite leaves the average as it is.
    """
    weight = shard.is_finite.to(average.dtype) * (1.0 - decay)
    average.lerp_(shard.master, torch.ones_like(weight) if step == 1 else weight)
