"""Activations of the MLP and their gradients, plain and gated (GLU).

    plain    fn(x)                         [..., f]   -> [..., f]
    gated    fn(gate) * (up + offset)      [..., 2 f] -> [..., f]     x is gate, then up

On GPUs one fused kernel computes each. The references here run in any dtype on any device. Arithmetic is in the
accumulation dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.config.model_spec.activation import ActivationFunction
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fp8.quantize import Amax, amax, quantize
from megatrain.kernels.fused import activations as fused
from megatrain.kernels.fused.launching import is_fused
from megatrain.kernels.sums import ColumnSums, column_sums_reference


@dataclass(frozen=True, kw_only=True)
class Activation:
    """The operation between the two linear layers of an MLP."""

    fn: ActivationFunction
    is_gated: bool = False
    clamp: float | None = None
    """Upper bound of the gate, and bound of the absolute value of `up`; None: none."""
    offset: float = 0.0
    """Constant added to `up`."""
    dx_sums: ColumnSums | None = field(default=None, compare=False)
    """The backward pass leaves the column sums of the gradient of x there."""
    dx_amax: Amax | None = field(default=None, compare=False)
    """The backward pass leaves the largest absolute value of the gradient of x there."""
    is_recomputed: bool = False
    """A linear layer that applies it does not save its result: the backward pass computes it again, with the gradient."""

    @property
    def kernel_args(self) -> tuple[str, bool, float | None, float]:
        """Arguments of the fused kernels."""
        return self.fn.name, self.is_gated, self.clamp, self.offset


def activate(x: Tensor, activation: Activation, seen: Tensor | None = None) -> Tensor:
    """Apply the activation: [..., f], or [..., 2 f] if gated -> [..., f].

    Args:
        seen: fp32 []: becomes the larger one of itself and the largest absolute value of the result.
    """
    if is_fused(x) and activation.fn.has_kernel:
        return fused.activate(x, *activation.kernel_args, seen=seen)
    y = _activate_reference(x, activation)
    if seen is not None:
        seen.copy_(torch.maximum(seen, amax(y)))
    return y


def _activate_reference(x: Tensor, activation: Activation) -> Tensor:
    if not activation.is_gated:
        y: Tensor = activation.fn.value(x.to(accumulation_dtype(x.dtype)))
        return y.to(x.dtype)
    if _is_plain_swiglu(activation):
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
    a, b = _clamped(x, activation)
    gated: Tensor = activation.fn.value(a)
    return (gated * (b + activation.offset)).to(x.dtype)


def activate_backward(
    dy: Tensor,
    x: Tensor,
    activation: Activation,
    *,
    recomputed: Tensor | None = None,
    overwrites_x: bool = False,
) -> Tensor:
    """Return the gradient of x; clamped elements have none.

    Args:
        recomputed: [..., f], contiguous: gets the activation, which the same pass recomputes. May be `dy`.
        overwrites_x: the gradient may take the memory of x.
    """
    if is_fused(x) and activation.fn.has_kernel:
        options: dict[str, Any] = {"overwrites_x": overwrites_x, "has_sums": activation.dx_sums is not None}
        seen = _amax_to_find(activation, x)
        dx, sums = fused.activate_backward(dy, x, recomputed, *activation.kernel_args, **options, seen=seen)
        if activation.dx_sums is not None and sums is not None:
            activation.dx_sums.parts = (sums,)
        return dx
    dx = activate_backward_reference(dy, x, activation)
    if activation.dx_sums is not None:
        activation.dx_sums.parts = (column_sums_reference(dx),)
    if activation.dx_amax is not None:
        activation.dx_amax.value = amax(dx)
    if recomputed is not None:
        recomputed.copy_(activate(x, activation))
    return dx


def activate_backward_cast(
    dy: Tensor, x: Tensor, activation: Activation, scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x and the transposed FP8 codes of the activation, [f, r]; may overwrite x and dy.

    Args:
        scale: fp32 [2], of `kernels.fp8.quantize.scale_of`.
        dtype: FP8 format.
    """
    if is_fused(x) and activation.fn.has_kernel and activation.dx_sums is None:
        seen = _amax_to_find(activation, x)
        return fused.activate_backward_cast(dy, x, scale, dtype, *activation.kernel_args, seen=seen)
    recomputed = dy if is_fused(x) else torch.empty_like(dy)
    dx = activate_backward(dy, x, activation, recomputed=recomputed, overwrites_x=is_fused(x))
    codes = quantize(recomputed.flatten(0, -2), scale, dtype, rows=False).columns
    assert codes is not None
    return dx, codes


def _amax_to_find(activation: Activation, x: Tensor) -> Tensor | None:
    """Return zero, for the kernel that finds the largest absolute value of the gradient of x; None: no layer needs it."""
    if activation.dx_amax is None:
        return None
    activation.dx_amax.value = torch.zeros((), dtype=torch.float32, device=x.device)
    return activation.dx_amax.value


def activate_weighted(
    x: Tensor, weights: Tensor, activation: Activation, ends: Tensor | None = None
) -> Tensor:
    """Multiply the activation of each row by the row's weight: [r, f], or [r, 2 f] if gated, and [r] -> [r, f].

    Args:
        ends: int32 [e]: rows after the last end are not read, and results have undefined values there. None: all are.
    """
    if is_fused(x) and activation.fn.has_kernel:
        return fused.activate(x, *activation.kernel_args, weights=weights, ends=ends)
    return _weighted(activate(x, activation), weights)


def activate_weighted_backward(
    dy: Tensor, x: Tensor, weights: Tensor, activation: Activation, ends: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weights; overwrites `dy` with the result of `activate_weighted`.

    Args:
        dy: [r, f], contiguous.
        ends: as for `activate_weighted`.
    """
    if is_fused(x) and activation.fn.has_kernel:
        return fused.activate_weighted_backward(dy, x, weights, *activation.kernel_args, ends=ends)
    dtype = accumulation_dtype(x.dtype)
    active = activate(x, activation)
    dx = activate_backward_reference(_weighted(dy, weights), x, activation)
    dweights = (dy.to(dtype) * active.to(dtype)).sum(-1).to(weights.dtype)
    dy.copy_(_weighted(active, weights))
    return dx, dweights


def _weighted(x: Tensor, weights: Tensor) -> Tensor:
    return (x * weights[:, None]).to(x.dtype)


def activate_backward_reference(dy: Tensor, x: Tensor, activation: Activation) -> Tensor:
    """Compute the gradient of x with torch operators."""
    fn, clamp = activation.fn, activation.clamp
    if not activation.is_gated:
        xw = x.to(accumulation_dtype(x.dtype))
        derivative: Tensor = fn.derivative(xw)
        return (dy.to(xw.dtype) * derivative).to(x.dtype)
    a, b = _clamped(x, activation)
    dyw = dy.to(a.dtype)
    if _is_plain_swiglu(activation):  # the most common case on CPUs, with torch's own kernels
        dx = torch.empty_like(x, dtype=a.dtype)
        dgate, dup = dx.chunk(2, dim=-1)
        dgate.copy_(torch.ops.aten.silu_backward(dyw * b, a))
        torch.mul(dyw, F.silu(a), out=dup)
        return dx.to(x.dtype)
    da = dyw * (b + activation.offset) * fn.derivative(a)
    db = dyw * fn.value(a)
    if clamp is not None:
        x_gate, x_up = x.chunk(2, dim=-1)
        da = da.masked_fill(x_gate > clamp, 0)
        db = db.masked_fill(x_up.abs() > clamp, 0)
    return torch.cat((da, db), dim=-1).to(x.dtype)


def _is_plain_swiglu(activation: Activation) -> bool:
    """Source: Shazeer, arXiv:2002.05202."""
    return activation.fn is SILU and activation.clamp is None and not activation.offset


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
"""Beyond it tanh is 1 to the last bit, also in fp64; far beyond it x * x may overflow."""
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
"""GELU, exact, with the error function."""
GELU_TANH = ActivationFunction("gelu_tanh", _gelu_tanh, _gelu_tanh_derivative, has_kernel=True)
"""Approximation of GELU by tanh. Source: Hendrycks and Gimpel, arXiv:1606.08415."""
QUICK_GELU = ActivationFunction("quick_gelu", _quick_gelu, _quick_gelu_derivative, has_kernel=True)
"""Approximation of GELU by a logistic function; same source."""
SILU = ActivationFunction("silu", _silu, _silu_derivative, has_kernel=True)
SQUARED_RELU = ActivationFunction("squared_relu", _squared_relu, _squared_relu_derivative, has_kernel=True)
"""Source: So et al., arXiv:2109.08668."""
