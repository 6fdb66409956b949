"""LayerNorm and RMSNorm over the last dimension, fused with the residual addition before them, forward and backward.

    total = x + delta        y = (total - mean) * rstd * (weight + offset) + bias

LayerNorm has a bias; RMSNorm has none, and does not subtract the mean. On GPUs one fused kernel computes each pass. The
references here run in any dtype on any device.

Sources: Ba et al., arXiv:1607.06450; Zhang and Sennrich, arXiv:1910.07467.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fused import norms as fused
from megatrain.kernels.fused.launching import is_fused


class NormOutput(NamedTuple):
    """Result of a norm, and the statistics for its backward pass."""

    total: Tensor
    """x + delta in the dtype of x; x itself without a delta."""
    y: Tensor
    """Normalized output in the dtype of the weight."""
    mean: Tensor | None
    """[..., 1] in the accumulation dtype; None for RMSNorm."""
    rstd: Tensor
    """Reciprocal standard deviation or root mean square, [..., 1] in the accumulation dtype."""


class NormGradients(NamedTuple):
    """Gradients of x (and of delta, which is the same), and of weight and bias."""

    dx: Tensor
    rows: Tensor
    """Rows whose sum is the gradient of the weight, [rows, h], or of weight and bias, [rows, 2 h], in the accumulation dtype."""


def norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, offset: float = 0.0
) -> NormOutput:
    """Add the residual and normalize.

    Args:
        x: [..., h], in the dtype of the weight or a higher precision.
        delta: added to x first, or None; with one dimension more than x, two terms whose sum is rounded and added.
        weight, bias: [h]; RMSNorm without a bias.
        eps: added to the variance.
        offset: added to the weight; 1 for weights stored as the difference from 1.
    """
    if is_fused(x):
        return NormOutput(*fused.norm(x, delta, weight, bias, eps, offset))
    total = x if delta is None else add_terms(x, delta) if delta.dim() > x.dim() else x + delta
    xw = total.to(accumulation_dtype(x.dtype))
    gain = weight.to(xw.dtype) + offset
    if bias is None:
        rstd = torch.rsqrt(xw.square().mean(-1, keepdim=True) + eps)
        return NormOutput(total, (xw * rstd * gain).to(weight.dtype), None, rstd)
    variance, mean = torch.var_mean(xw, dim=-1, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    y = (xw - mean) * rstd * gain + bias.to(xw.dtype)
    return NormOutput(total, y.to(weight.dtype), mean, rstd)


def norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    output: NormOutput,
    weight: Tensor,
    offset: float = 0.0,
    dy_term: Tensor | None = None,
) -> NormGradients:
    """Return the gradients of `norm`.

    Args:
        dtotal: gradient of the sum, None if it has no other use.
        output: result of `norm`; its `y` is not read.
        dy_term: added to `dy` first, and the sum rounded; or None.
    """
    if is_fused(dy):
        statistics = output.total, weight, output.mean, output.rstd, offset
        return NormGradients(*fused.norm_backward(dy, dtotal, *statistics, dy_term))
    dy = dy if dy_term is None else dy + dy_term
    total, _, mean, rstd = output
    xw = total.to(rstd.dtype)
    normed = (xw if mean is None else xw - mean) * rstd
    dyw = dy.to(rstd.dtype)
    of_parameters = [dyw * normed] if mean is None else [dyw * normed, dyw]
    rows = torch.cat([x.flatten(0, -2).sum(0, keepdim=True) for x in of_parameters], dim=1)
    dnormed = dyw * (weight.to(rstd.dtype) + offset)
    centred = dnormed if mean is None else dnormed - dnormed.mean(-1, keepdim=True)
    dx = (rstd * (centred - normed * (dnormed * normed).mean(-1, keepdim=True))).to(total.dtype)
    return NormGradients(dx if dtotal is None else dx + dtotal, rows)


def add_terms(x: Tensor, terms: Tensor) -> Tensor:
    """Add the sum of two terms, rounded: [..., h] and [2, ..., h] -> [..., h]."""
    return fused.add_terms(x, terms) if is_fused(x) else x + (terms[0] + terms[1])
