"""The update rules: what an optimizer keeps for each element, and how a flat range of weights moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatrain.kernels.adamw import AdamwStep, adamw
from megatrain.kernels.sgd import sgd


@dataclass(frozen=True, kw_only=True)
class UpdateStep:
    """The numbers of one step for one range."""

    step: int
    """Counted from 1."""
    lr: float
    weight_decay: float
    grad_scale: Tensor
    """What the gradients are multiplied with first: one number, on their device."""


class UpdateRule(Protocol):
    """An optimizer's mathematics; it holds no state itself."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of what is kept for each element beside the main weight, as checkpoints have them."""

    def update(
        self, main: Tensor, kept: Mapping[str, Tensor], grad: Tensor, weight: Tensor, numbers: UpdateStep
    ) -> None:
        """Update a flat range in place. `weight` gets the new `main` in its own dtype; it may be `main` itself."""


@dataclass(frozen=True, kw_only=True)
class AdamwRule:
    """Adam with decoupled weight decay."""

    beta1: float
    beta2: float
    eps: float

    kinds = ("exp_avg", "exp_avg_sq")

    def update(
        self, main: Tensor, kept: Mapping[str, Tensor], grad: Tensor, weight: Tensor, numbers: UpdateStep
    ) -> None:
        """See `UpdateRule`."""
        step = AdamwStep(
            lr=numbers.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            step=numbers.step,
            grad_scale=numbers.grad_scale,
        )
        adamw(main, kept["exp_avg"], kept["exp_avg_sq"], grad, weight, step, numbers.weight_decay)


@dataclass(frozen=True, kw_only=True)
class SgdRule:
    """Gradient descent with momentum."""

    momentum: float

    kinds = ("momentum_buffer",)

    def update(
        self, main: Tensor, kept: Mapping[str, Tensor], grad: Tensor, weight: Tensor, numbers: UpdateStep
    ) -> None:
        """See `UpdateRule`."""
        sgd(
            main,
            kept["momentum_buffer"],
            grad,
            weight,
            lr=numbers.lr,
            momentum=self.momentum,
            grad_scale=numbers.grad_scale,
            weight_decay=numbers.weight_decay,
        )
