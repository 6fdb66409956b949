"""Activations of the MLP and their gradients, alone and behind a gate.

    alone    activation_fn(x)                                  [..., f]   -> [..., f]
    gated    activation_fn(gate) * (up + offset)               [..., 2 f] -> [..., f]     x is gate, then up

On GPUs one fused kernel does each; the references here do the same in any dtype on any device. Arithmetic runs in
`accumulation_dtype(dtype)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fused import activations as fused
from megatrain.kernels.fused.launching import is_fused


@dataclass(frozen=True)
class ActivationFunction:
    """A function of one number, and its derivative."""

    name: str
    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    has_kernel: bool = False
    """Whether fused kernels know it by its name."""


@dataclass(frozen=True, kw_only=True)
class Activation:
    """What stands between the two linear layers of an MLP."""

    activation_fn: ActivationFunction
    is_gated: bool = False
    clamp: float | None = None
    """Largest gate, and largest size of `up`."""
    offset: float = 0.0
    """Added to `up`."""

    @property
    def numbers(self) -> tuple[str, bool, float | None, float]:
        """As fused kernels take it."""
        return self.activation_fn.name, self.is_gated, self.clamp, self.offset


def activate(x: Tensor, activation: Activation) -> Tensor:
    """[..., f], or [..., 2 f] behind a gate -> [..., f]."""
    if is_fused(x) and activation.activation_fn.has_kernel:
        return fused.activate(x, *activation.numbers)
    return activate_reference(x, activation)


def activate_backward(
    dy: Tensor, x: Tensor, activation: Activation, *, again: Tensor | None = None, uses_up: bool = False
) -> Tensor:
    """Gradient of `activate`, in the shape of x. What is clamped has none.

    Args:
        again: [..., f], contiguous, gets the activation a second time, where it was not kept: the same pass forms it. May
            be `dy`.
        uses_up: whether the gradient may lie where x was.
    """
    if is_fused(x) and activation.activation_fn.has_kernel:
        return fused.activate_backward(dy, x, again, *activation.numbers, uses_up=uses_up)
    dx = activate_backward_reference(dy, x, activation)
    if again is not None:
        again.copy_(activate_reference(x, activation))
    return dx


def activate_weighted(x: Tensor, weights: Tensor, activation: Activation) -> Tensor:
    """The activation of each row, times the row's weight: [r, f], or [r, 2 f] behind a gate, and [r] -> [r, f]."""
    if is_fused(x) and activation.activation_fn.has_kernel:
        return fused.activate(x, *activation.numbers, weights=weights)
    return _weighted(activate_reference(x, activation), weights)


def activate_weighted_backward(
    dy: Tensor, x: Tensor, weights: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weights; dy becomes what `activate_weighted` gave.

    Args:
        dy: [r, f], contiguous.
    """
    if is_fused(x) and activation.activation_fn.has_kernel:
        return fused.activate_weighted_backward(dy, x, weights, *activation.numbers)
    return activate_weighted_backward_reference(dy, x, weights, activation)


def activate_weighted_backward_reference(
    dy: Tensor, x: Tensor, weights: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    """The same, written out."""
    kind = accumulation_dtype(x.dtype)
    active = activate_reference(x, activation)
    dx = activate_backward_reference(_weighted(dy, weights), x, activation)
    dweights = (dy.to(kind) * active.to(kind)).sum(-1).to(weights.dtype)
    dy.copy_(_weighted(active, weights))
    return dx, dweights


def _weighted(x: Tensor, weights: Tensor) -> Tensor:
    return (x * weights[:, None]).to(x.dtype)


def activate_reference(x: Tensor, activation: Activation) -> Tensor:
    """The same, written out."""
    if not activation.is_gated:
        return activation.activation_fn.value(x.to(accumulation_dtype(x.dtype))).to(x.dtype)
    if _is_plain_swiglu(activation):
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
    a, b = _clamped(x, activation)
    return (activation.activation_fn.value(a) * (b + activation.offset)).to(x.dtype)


def activate_backward_reference(dy: Tensor, x: Tensor, activation: Activation) -> Tensor:
    """The same, written out."""
    activation_fn, clamp = activation.activation_fn, activation.clamp
    if not activation.is_gated:
        xw = x.to(accumulation_dtype(x.dtype))
        return (dy.to(xw.dtype) * activation_fn.derivative(xw)).to(x.dtype)
    a, b = _clamped(x, activation)
    dyw = dy.to(a.dtype)
    if _is_plain_swiglu(activation):  # what CPUs train most with, in torch's own kernels
        dx = torch.empty_like(x, dtype=a.dtype)
        dgate, dup = dx.chunk(2, dim=-1)
        dgate.copy_(torch.ops.aten.silu_backward(dyw * b, a))
        torch.mul(dyw, F.silu(a), out=dup)
        return dx.to(x.dtype)
    da = dyw * (b + activation.offset) * activation_fn.derivative(a)
    db = dyw * activation_fn.value(a)
    if clamp is not None:
        x_gate, x_up = x.chunk(2, dim=-1)
        da = da.masked_fill(x_gate > clamp, 0)
        db = db.masked_fill(x_up.abs() > clamp, 0)
    return torch.cat((da, db), dim=-1).to(x.dtype)


def _is_plain_swiglu(activation: Activation) -> bool:
    """Source: Shazeer, arXiv:2002.05202."""
    return activation.activation_fn is SILU and activation.clamp is None and not activation.offset


def _clamped(x: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    a, b = x.to(accumulation_dtype(x.dtype)).chunk(2, dim=-1)
    if activation.clamp is None:
        return a, b
    return a.clamp(max=activation.clamp), b.clamp(-activation.clamp, activation.clamp)


_SQRT_HALF = math.sqrt(0.5)
_INVERSE_SQRT_2_PI = 1 / math.sqrt(2 * math.pi)
_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBE = 0.044715
_TANH_END = 10.0
"""From here on that tanh is 1 to the last bit in fp64 too; further out x * x may be infinite."""
_QUICK = 1.702


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x * _SQRT_HALF))


def _gelu_derivative(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x * _SQRT_HALF)) + x * torch.exp(-0.5 * x * x) * _INVERSE_SQRT_2_PI


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(_TANH_SCALE * x * (1 + _TANH_CUBE * x * x)))


def _gelu_tanh_derivative(x: Tensor) -> Tensor:
    near = x.clamp(-_TANH_END, _TANH_END)
    tanh = torch.tanh(_TANH_SCALE * near * (1 + _TANH_CUBE * near * near))
    inner = _TANH_SCALE * (1 + 3 * _TANH_CUBE * near * near)
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(_QUICK * x)


def _quick_gelu_derivative(x: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(_QUICK * x)
    return sigmoid * (1 + _QUICK * x * (1 - sigmoid))


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _silu_derivative(x: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x)
    return sigmoid * (1 + x * (1 - sigmoid))


def _squared_relu(x: Tensor) -> Tensor:
    return x.clamp(min=0).square()


def _squared_relu_derivative(x: Tensor) -> Tensor:
    return 2 * x.clamp(min=0)


GELU = ActivationFunction("gelu", _gelu, _gelu_derivative, has_kernel=True)
"""x times the normal distribution function, by the error function."""
GELU_TANH = ActivationFunction("gelu_tanh", _gelu_tanh, _gelu_tanh_derivative, has_kernel=True)
"""Its approximation by tanh. Source: Hendrycks and Gimpel, arXiv:1606.08415."""
QUICK_GELU = ActivationFunction("quick_gelu", _quick_gelu, _quick_gelu_derivative, has_kernel=True)
"""Its approximation by a logistic function; same source."""
SILU = ActivationFunction("silu", _silu, _silu_derivative, has_kernel=True)
SQUARED_RELU = ActivationFunction("squared_relu", _squared_relu, _squared_relu_derivative, has_kernel=True)
"""Source: So et al., arXiv:2109.08668."""
