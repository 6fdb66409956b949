"""AWQ: scales the input channels of a weight so that the important ones are rounded finely, then clips its groups.

    W x = (W diag(s)) (x / s)        s = mean |x| ^ alpha        the layer before divides its outputs by s

The best alpha, and the best range of each group of weights, are searched: the loss is the mean square error of the outputs, which
H = X X^T gives without the inputs themselves, as tr(D H D^T) for an error D of the weights. Source: Lin et al., arXiv:2306.00978.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.config.schema.quantization import NumberFormat
from megatrain.kernels.quantization.rounding import amax_of, round_trip, scales_for, scales_of

_ALPHAS = [step / 20 for step in range(20)]
_RANGES = [1 - step / 20 for step in range(1, 11)]
"""Fractions of the largest absolute value that a group's scale may cover; beyond it, weights are clipped."""


def output_error(error: Tensor, hessian: Tensor) -> float:
    """Return the sum of squares of the outputs' errors, for errors [o, i] of a weight and the sum of x x^T."""
    return float((error @ hessian).mul_(error).sum())


def channel_scales(
    weights: Sequence[Tensor], hessian: Tensor, mean_abs: Tensor, numbers: NumberFormat
) -> Tensor:
    """Return s [i]; all are 1 if no scaling is better.

    Args:
        weights: [o, i] each, all with the same inputs.
        mean_abs: mean of |x| of each channel, [i].
    """
    best, least = torch.ones_like(mean_abs), float("inf")
    for alpha in _ALPHAS:
        s = mean_abs.clamp(min=1e-4) ** alpha
        s = s / (s.max() * s.min()).sqrt()
        loss = 0.0
        for weight in weights:
            scaled = weight * s
            rounded = round_trip(scaled, scales_of(scaled, numbers), numbers)
            loss += output_error((rounded - scaled) / s, hessian)
        if loss < least:
            best, least = s, loss
    return best


def clipped_scales(weight: Tensor, hessian: Tensor, numbers: NumberFormat, dtype: torch.dtype) -> Tensor:
    """Return the scales of outputs or groups, each for the range with the least error of its own inputs.

    Args:
        hessian: as for `output_error`; only the inputs of a group count for it.
    """
    size = numbers.group_size or weight.shape[1]
    count = weight.shape[1] // size
    inner = torch.stack([hessian[at : at + size, at : at + size] for at in range(0, count * size, size)])
    amax = amax_of(weight, numbers)
    best = scales_for(amax, numbers, weight.dtype, dtype)
    least = _group_errors(weight, best, numbers, inner)
    for part in _RANGES:
        scales = scales_for(amax * part, numbers, weight.dtype, dtype)
        loss = _group_errors(weight, scales, numbers, inner)
        best = torch.where(loss < least, scales, best)
        least = torch.minimum(loss, least)
    return best


def _group_errors(weight: Tensor, scales: Tensor, numbers: NumberFormat, inner: Tensor) -> Tensor:
    """Return the error of the outputs that each group makes alone, [o, groups]; `inner`: [groups, size, size]."""
    error = (round_trip(weight, scales, numbers) - weight).unflatten(1, (len(inner), -1)).transpose(0, 1)
    found: Tensor = ((error @ inner) * error).sum(-1)
    return found.t()
