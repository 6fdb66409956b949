"""GPTQ: rounds a weight column by column and moves the error of each to the columns that follow.

Minimizes |W X - Q X|^2 greedily with the inverse of H = X X^T, where X are the inputs of a calibration. Columns with the largest
inputs come first, and keep the groups that they have in the weight. Source: Frantar et al., arXiv:2210.17323.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.config.schema.quantization import NumberFormat
from megatrain.kernels.quantization.rounding import round_to, spread

_BLOCK_COLUMNS = 128
_DAMPING = 0.01
"""Part of the mean of H's diagonal that is added to it."""


def gptq(weight: Tensor, hessian: Tensor, scales: Tensor, numbers: NumberFormat) -> Tensor:
    """Return the numbers of a weight [o, i] in its dtype, for given scales of outputs or groups.

    Args:
        hessian: sum of x x^T over the inputs of the calibration, [i, i].
    """
    order = hessian.diagonal().argsort(descending=True)
    columns = weight[:, order].clone()
    wide = spread(scales, weight.shape, numbers).expand_as(weight)[:, order]
    inverse = _inverse_factor(hessian[order][:, order])
    found = torch.empty_like(columns)
    for start in range(0, weight.shape[1], _BLOCK_COLUMNS):
        stop = min(start + _BLOCK_COLUMNS, weight.shape[1])
        errors = torch.empty_like(columns[:, start:stop])
        for number in range(start, stop):
            column, scale = columns[:, number], wide[:, number]
            found[:, number] = round_to(column / scale, numbers)
            error = (column - found[:, number] * scale) / inverse[number, number]
            columns[:, number + 1 : stop] -= error[:, None] * inverse[number, number + 1 : stop]
            errors[:, number - start] = error
        columns[:, stop:] -= errors @ inverse[start:stop, stop:]
    result = torch.empty_like(found)
    result[:, order] = found
    return result


def _inverse_factor(hessian: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of H, whose diagonal is raised; inputs that are always 0 count as 1."""
    hessian = hessian.double()
    diagonal = hessian.diagonal()
    diagonal[diagonal == 0] = 1
    diagonal += _DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()
