"""The kernels as autograd functions: what they keep for the backward pass, and where weight gradients go."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from megatrain.kernels import elementwise
from megatrain.parallel.batch import PassInfo


def rms_norm(x: Tensor, weight: Tensor, weight_grad: Tensor | None, eps: float, info: PassInfo) -> Tensor:
    """`kernels.elementwise.rms_norm`; keeps x, and adds the weight's gradient to `weight_grad`."""
    out: Tensor = _RmsNorm.apply(x, weight, weight_grad, eps, info)
    return out


def swiglu(x: Tensor) -> Tensor:
    """`kernels.elementwise.swiglu`; keeps x."""
    out: Tensor = _Swiglu.apply(x)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`kernels.elementwise.rotate`; keeps nothing but the tables."""
    out: Tensor = _Rotate.apply(x, cos, sin)
    return out


class _RmsNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, weight_grad: Tensor | None, eps: float, info: PassInfo
    ) -> Tensor:
        y, rstd = elementwise.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.weight_grad, ctx.info = weight_grad, info
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = elementwise.rms_norm_backward(grads[0], x, weight, rstd)
        ctx.weight_grad.add_(dweight)
        return dx, None, None, None, None


class _Swiglu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return elementwise.swiglu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return elementwise.swiglu_backward(grads[0], x)


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return elementwise.rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return elementwise.rotate(grads[0], cos, -sin), None, None
