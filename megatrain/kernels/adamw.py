"""One pass of AdamW over a flat range.

    main, exp_avg, exp_avg_sq, gradient  ->  main, exp_avg, exp_avg_sq, weight

Source: Loshchilov and Hutter, arXiv:1711.05101 (decoupled weight decay).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

_CHUNK = 1 << 16
"""Elements that are worked on at once on a CPU: four of them in fp32 stay in its cache."""


@dataclass(frozen=True, kw_only=True)
class AdamwStep:
    """The numbers of one step. `step` counts from 1 and corrects the moments' bias."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    step: int
    grad_scale: Tensor
    """What the gradients are multiplied with first (clipping): one number, on their device."""


def adamw(
    main: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    weight: Tensor,
    numbers: AdamwStep,
    weight_decay: float,
) -> None:
    """Update a flat range in place; `weight` gets the new `main` in its own dtype (it may be `main` itself)."""
    size = main.numel()
    chunk = size if main.is_cuda else _CHUNK
    for start in range(0, size, max(chunk, 1)):
        part = slice(start, start + chunk)
        _adamw_reference(
            main[part], exp_avg[part], exp_avg_sq[part], grad[part], weight[part], numbers, weight_decay
        )


def _adamw_reference(
    main: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    weight: Tensor,
    numbers: AdamwStep,
    weight_decay: float,
) -> None:
    scaled = grad.to(main.dtype) * numbers.grad_scale
    exp_avg.lerp_(scaled, 1 - numbers.beta1)
    exp_avg_sq.mul_(numbers.beta2).addcmul_(scaled, scaled, value=1 - numbers.beta2)
    correction1 = 1 - numbers.beta1**numbers.step
    correction2 = 1 - numbers.beta2**numbers.step
    denominator = (exp_avg_sq / correction2).sqrt_().add_(numbers.eps)
    main.mul_(1 - numbers.lr * weight_decay).addcdiv_(exp_avg, denominator, value=-numbers.lr / correction1)
    if weight.data_ptr() != main.data_ptr():
        weight.copy_(main)
