"""Biases of groups of rows, such as experts: added to the outputs of a grouped GEMM.

The rows of each group are consecutive, and `ends`, int32 [e], has their ends, as in `grouped_gemm.py`. Rows after the last
end have undefined values. The host does not wait for `ends`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.linear import accumulate_weight_gradient


def add_grouped_bias(y: Tensor, bias: Tensor, ends: Tensor, weights: Tensor | None = None) -> Tensor:
    """Add to each row of y, [r, o], the bias of its group, [e, o], times the row's weight, [r]; in place."""
    rows = _biases_of_rows(y, bias, ends)
    return y.add_(rows if weights is None else (rows * weights[:, None]).to(y.dtype))


def grouped_bias_weight_gradient(dy: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient of the weights of `add_grouped_bias`: dy [r, o] -> [r] in the accumulation dtype."""
    dtype = accumulation_dtype(dy.dtype)
    return (dy.to(dtype) * _biases_of_rows(dy, bias, ends).to(dtype)).sum(-1)


def accumulate_grouped_bias_gradient(
    grad: Tensor, dy: Tensor, ends: Tensor, weights: Tensor | None = None
) -> None:
    """Add the sum of the rows of each group, times their weights, to `grad`: dy [r, o] -> [e, o]."""
    groups = _groups_of_rows(dy, ends)
    is_member = groups[:, None] == torch.arange(len(ends), device=dy.device)
    dy = dy.masked_fill((groups == len(ends))[:, None], 0)
    members = is_member if weights is None else is_member * weights[:, None]
    accumulate_weight_gradient(grad, members.to(dy.dtype), dy)


def _groups_of_rows(rows: Tensor, ends: Tensor) -> Tensor:
    """Return the group of each row, int64 [r]; the number of groups for rows after the last end."""
    return torch.searchsorted(ends, torch.arange(len(rows), device=rows.device), right=True)


def _biases_of_rows(rows: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    return bias.index_select(0, _groups_of_rows(rows, ends).clamp(max=len(bias) - 1))
