"""Element-wise operations of a transformer layer, forward and backward, in any dtype on any device.

These are the references that fused kernels are measured against. Arithmetic runs in `wide(dtype)`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def wide(dtype: torch.dtype) -> torch.dtype:
    """Dtype for sums over many elements: fp32, or the operand's own where that is wider."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Root-mean-square norm over the last dimension.

    Args:
        x: [..., h], as wide as the weight or wider.
        weight: [h].
        eps: added to the mean square.
        offset: added to the weight: 1 where weights are kept as their distance from 1.
    Returns:
        The normed tensor, [..., h] in the weight's dtype, and the reciprocal root mean square, wide [..., 1], for the
        backward pass.

    Source: Zhang and Sennrich, arXiv:1910.07467.
    """
    xw = x.to(wide(x.dtype))
    rstd = torch.rsqrt(xw.square().mean(-1, keepdim=True) + eps)
    return (xw * rstd * (weight.to(xw.dtype) + offset)).to(weight.dtype), rstd


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm`: of x, [..., h], and of the weight, wide [h]."""
    normed = x.to(rstd.dtype) * rstd
    dyw = dy.to(rstd.dtype)
    dweight = (dyw * normed).flatten(0, -2).sum(0)
    dnormed = dyw * (weight.to(rstd.dtype) + offset)
    dx = rstd * (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), dweight


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm of mean 0 and variance 1 over the last dimension, then weight and bias; arguments as for `rms_norm`.

    Returns:
        The normed tensor, [..., h] in the weight's dtype; mean and reciprocal deviation, wide [..., 1].

    Source: Ba et al., arXiv:1607.06450.
    """
    xw = x.to(wide(x.dtype))
    variance, mean = torch.var_mean(xw, dim=-1, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    y = (xw - mean) * rstd * (weight.to(xw.dtype) + offset) + bias.to(xw.dtype)
    return y.to(weight.dtype), mean, rstd


def layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `layer_norm`: of x, [..., h], and of weight and bias, wide [h]."""
    normed = (x.to(rstd.dtype) - mean) * rstd
    dyw = dy.to(rstd.dtype)
    dweight, dbias = (dyw * normed).flatten(0, -2).sum(0), dyw.flatten(0, -2).sum(0)
    dnormed = dyw * (weight.to(rstd.dtype) + offset)
    centred = dnormed - dnormed.mean(-1, keepdim=True)
    dx = rstd * (centred - normed * (dnormed * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), dweight, dbias


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up, where x is [..., 2 f]: gate, then up. Returns [..., f].

    Source: Shazeer, arXiv:2002.05202.
    """
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Gradient of `swiglu`, [..., 2 f]."""
    xw = x.to(wide(x.dtype))
    gate, up = xw.chunk(2, dim=-1)
    dyw = dy.to(gate.dtype)
    dx = torch.empty_like(xw)
    dgate, dup = dx.chunk(2, dim=-1)
    dgate.copy_(torch.ops.aten.silu_backward(dyw * up, gate))
    torch.mul(dyw, F.silu(gate), out=dup)
    return dx.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels by the angle of its position (rotary embedding).

    Channel i pairs with channel i + d/2; weights trained with neighbouring pairs must be permuted first. The
    backward pass is the same turn with -sin.

    Args:
        x: queries or keys, [s, b, n, d].
        cos, sin: wide tables of the positions, [s, 1, 1, d/2].
    Returns:
        [s, b, n, d] in the dtype of `x`.

    Source: RoFormer, arXiv:2104.09864, section 3.4.
    """
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
