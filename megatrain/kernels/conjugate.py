"""Linear maps for autograd, as pairs of functions: one for the values, one for the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function


class Conjugate(Function):
    """`forward_fn` of tensors, and `backward_fn` of the gradients of its results, one gradient for each tensor."""

    @staticmethod
    def forward(ctx: Any, forward_fn: Callable[..., Any], backward_fn: Callable[..., Any], *x: Tensor) -> Any:
        ctx.backward_fn = backward_fn
        return forward_fn(*x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx = ctx.backward_fn(*grads)
        return None, None, *(dx if isinstance(dx, tuple) else (dx,))
