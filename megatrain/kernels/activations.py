"""Activations of the MLP and their slopes, alone and behind a gate, in any dtype on any device.

    alone    curve(x)                                  [..., f]   -> [..., f]
    gated    curve(gate) * (up + offset)               [..., 2 f] -> [..., f]     x is gate, then up

These are the references that fused kernels are measured against. Arithmetic runs in `wide(dtype)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.kernels.elementwise import wide


@dataclass(frozen=True)
class Curve:
    """A function of one number, and its derivative."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Gate:
    """How a gated activation treats its two halves."""

    curve: Curve
    clamp: float | None = None
    """Largest gate, and largest size of `up`."""
    offset: float = 0.0
    """Added to `up`."""


def activate(x: Tensor, curve: Curve) -> Tensor:
    """curve(x), elementwise."""
    return curve.value(x.to(wide(x.dtype))).to(x.dtype)


def activate_backward(dy: Tensor, x: Tensor, curve: Curve) -> Tensor:
    """Gradient of `activate`."""
    xw = x.to(wide(x.dtype))
    return (dy.to(xw.dtype) * curve.slope(xw)).to(x.dtype)


def activate_gated(x: Tensor, gate: Gate) -> Tensor:
    """curve(gate) * (up + offset), where x is [..., 2 f]: gate, then up. Returns [..., f]."""
    a, b = _clamped(x, gate)
    return (gate.curve.value(a) * (b + gate.offset)).to(x.dtype)


def activate_gated_backward(dy: Tensor, x: Tensor, gate: Gate) -> Tensor:
    """Gradient of `activate_gated`, [..., 2 f]. What is clamped has none."""
    a, b = _clamped(x, gate)
    dyw = dy.to(a.dtype)
    da = dyw * (b + gate.offset) * gate.curve.slope(a)
    db = dyw * gate.curve.value(a)
    if gate.clamp is not None:
        x_gate, x_up = x.chunk(2, dim=-1)
        da = da.masked_fill(x_gate > gate.clamp, 0)
        db = db.masked_fill(x_up.abs() > gate.clamp, 0)
    return torch.cat((da, db), dim=-1).to(x.dtype)


def _clamped(x: Tensor, gate: Gate) -> tuple[Tensor, Tensor]:
    a, b = x.to(wide(x.dtype)).chunk(2, dim=-1)
    if gate.clamp is None:
        return a, b
    return a.clamp(max=gate.clamp), b.clamp(-gate.clamp, gate.clamp)


_SQRT_HALF = math.sqrt(0.5)
_INVERSE_SQRT_2_PI = 1 / math.sqrt(2 * math.pi)
_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBE = 0.044715
_QUICK = 1.702


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x * _SQRT_HALF))


def _gelu_slope(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x * _SQRT_HALF)) + x * torch.exp(-0.5 * x * x) * _INVERSE_SQRT_2_PI


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(_TANH_SCALE * x * (1 + _TANH_CUBE * x * x)))


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    tanh = torch.tanh(_TANH_SCALE * x * (1 + _TANH_CUBE * x * x))
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * _TANH_SCALE * (1 + 3 * _TANH_CUBE * x * x)


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(_QUICK * x)


def _quick_gelu_slope(x: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(_QUICK * x)
    return sigmoid * (1 + _QUICK * x * (1 - sigmoid))


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _silu_slope(x: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x)
    return sigmoid * (1 + x * (1 - sigmoid))


def _squared_relu(x: Tensor) -> Tensor:
    return x.clamp(min=0).square()


def _squared_relu_slope(x: Tensor) -> Tensor:
    return 2 * x.clamp(min=0)


GELU = Curve(_gelu, _gelu_slope)
"""x times the normal distribution function, by the error function."""
GELU_TANH = Curve(_gelu_tanh, _gelu_tanh_slope)
"""Its approximation by tanh. Source: Hendrycks and Gimpel, arXiv:1606.08415."""
QUICK_GELU = Curve(_quick_gelu, _quick_gelu_slope)
"""Its approximation by a logistic function; same source."""
SILU = Curve(_silu, _silu_slope)
SQUARED_RELU = Curve(_squared_relu, _squared_relu_slope)
"""Source: So et al., arXiv:2109.08668."""
