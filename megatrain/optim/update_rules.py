"""Element-wise update rules: the state that an optimizer keeps per element, and the update of a flat shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatrain.kernels.optimizer.adamw import AdamwStep, adamw
from megatrain.kernels.optimizer.sgd import sgd
from megatrain.kernels.optimizer.shard_update import FlatUpdate


class UpdateRule(Protocol):
    """The mathematics of an optimizer; holds no state itself."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the state per element in addition to the master weight, as in checkpoints."""

    def update(self, shard: FlatUpdate, moments: Mapping[str, Tensor], step: int) -> None:
        """Update a shard and its moments in place. `step` counts from 1."""


@dataclass(frozen=True, kw_only=True)
class AdamwRule:
    """Adam with decoupled weight decay."""

    beta1: float
    beta2: float
    eps: float

    kinds = ("exp_avg", "exp_avg_sq")

    def update(self, shard: FlatUpdate, moments: Mapping[str, Tensor], step: int) -> None:
        """See `UpdateRule`."""
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
    """Stochastic gradient descent with momentum."""

    momentum: float

    kinds = ("momentum_buffer",)

    def update(self, shard: FlatUpdate, moments: Mapping[str, Tensor], step: int) -> None:  # noqa: ARG002 (no step count)
        """See `UpdateRule`."""
        sgd(shard, moments["momentum_buffer"], momentum=self.momentum)
