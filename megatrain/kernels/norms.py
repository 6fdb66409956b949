"""Norms over the last dimension, with the sum of the residual stream before them, forward and backward.

    total = x + delta        y = (total - mean) * rstd * (weight + offset) + bias

With a bias it is LayerNorm, without one RMSNorm, which takes no mean off. On GPUs one fused kernel does either way;
the references here do the same in any dtype on any device.

Sources: Ba et al., arXiv:1607.06450; Zhang and Sennrich, arXiv:1910.07467.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fused import norms as fused
from megatrain.kernels.fused.launching import is_fused


class Normed(NamedTuple):
    """A norm, and what its backward pass needs."""

    total: Tensor
    """x + delta, in the dtype of x; x itself without a delta."""
    y: Tensor
    """In the dtype of the weight."""
    mean: Tensor | None
    """Wide [..., 1]; None for RMSNorm."""
    rstd: Tensor
    """Reciprocal deviation or root mean square, wide [..., 1]."""


class NormGradients(NamedTuple):
    """Of x (and of delta, which has the same), and, wide, of weight and bias."""

    dx: Tensor
    dweight: Tensor
    dbias: Tensor | None


def norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, offset: float = 0.0
) -> Normed:
    """Sum and norm.

    Args:
        x: [..., h], as wide as the weight or wider.
        delta: added first, or None.
        weight, bias: [h]; without a bias it is RMSNorm.
        eps: added to the variance.
        offset: added to the weight: 1 where weights are kept as their distance from 1.
    """
    if is_fused(x):
        return Normed(*fused.norm(x, delta, weight, bias, eps, offset))
    return norm_reference(x, delta, weight, bias, eps, offset)


def norm_backward(
    dy: Tensor, dtotal: Tensor | None, known: Normed, weight: Tensor, offset: float = 0.0
) -> NormGradients:
    """Gradients of `norm`; `dtotal` is that of the sum, None if nothing else reads it. `known.y` is not read."""
    if is_fused(dy):
        dx, dweight, dbias = fused.norm_backward(
            dy, dtotal, known.total, weight, known.mean, known.rstd, offset
        )
        return NormGradients(dx, dweight, dbias)
    return norm_backward_reference(dy, dtotal, known, weight, offset)


def norm_reference(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, offset: float = 0.0
) -> Normed:
    """The same, written out."""
    total = x if delta is None else x + delta
    xw = total.to(accumulation_dtype(x.dtype))
    gain = weight.to(xw.dtype) + offset
    if bias is None:
        rstd = torch.rsqrt(xw.square().mean(-1, keepdim=True) + eps)
        return Normed(total, (xw * rstd * gain).to(weight.dtype), None, rstd)
    variance, mean = torch.var_mean(xw, dim=-1, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    y = (xw - mean) * rstd * gain + bias.to(xw.dtype)
    return Normed(total, y.to(weight.dtype), mean, rstd)


def norm_backward_reference(
    dy: Tensor, dtotal: Tensor | None, known: Normed, weight: Tensor, offset: float = 0.0
) -> NormGradients:
    """The same, written out."""
    total, _, mean, rstd = known
    xw = total.to(rstd.dtype)
    normed = (xw if mean is None else xw - mean) * rstd
    dyw = dy.to(rstd.dtype)
    dweight = (dyw * normed).flatten(0, -2).sum(0)
    dbias = None if mean is None else dyw.flatten(0, -2).sum(0)
    dnormed = dyw * (weight.to(rstd.dtype) + offset)
    centred = dnormed if mean is None else dnormed - dnormed.mean(-1, keepdim=True)
    dx = (rstd * (centred - normed * (dnormed * normed).mean(-1, keepdim=True))).to(total.dtype)
    return NormGradients(dx if dtotal is None else dx + dtotal, dweight, dbias)
