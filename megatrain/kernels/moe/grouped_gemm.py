"""Products of rows with the weights of the group that they belong to, as experts have them.

    rows of x, sorted by group     y[rows of g] = x[rows of g] W_g^T        ends: where the rows of each group end

In bf16 a single kernel does all groups, and no host waits for `ends`; in other dtypes one product follows the other.
Rows behind the last end are nobody's: they are not read, and what results hold there is undefined.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.kernels.wgrad import accumulate_weight_gradient

_ALIGNMENT = 8
"""Elements: widths are multiples of it where a single kernel does all groups."""


def grouped_gemm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Each row times the weight of its group.

    Args:
        x: [r, i], sorted by group.
        weight: [e, o, i].
        ends: int32 [e].
    Returns:
        [r, o].
    """
    if _is_one_kernel(weight):
        return _grouped(x, weight.transpose(1, 2), ends)
    out = x.new_empty(x.shape[0], weight.shape[1])
    for group, rows in _groups(ends):
        torch.mm(x[rows], weight[group].t(), out=out[rows])
    return out


def grouped_gemm_backward(dy: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Gradient of x: [r, o] -> [r, i]."""
    if _is_one_kernel(weight):
        return _grouped(dy, weight, ends)
    dx = dy.new_empty(dy.shape[0], weight.shape[2])
    for group, rows in _groups(ends):
        torch.mm(dy[rows], weight[group], out=dx[rows])
    return dx


def accumulate_grouped_weight_gradient(grad: Tensor, dy: Tensor, x: Tensor, ends: Tensor) -> None:
    """grad[g] += dy[rows of g]^T x[rows of g], [e, o, i]; the single kernel rounds each sum to bf16 before it is added."""
    if _is_one_kernel(x) and dy.shape[-1] % _ALIGNMENT == 0:
        grad.add_(_grouped(dy.t(), x, ends))
        return
    for group, rows in _groups(ends):
        accumulate_weight_gradient(grad[group], dy[rows], x[rows])


def _is_one_kernel(weight: Tensor) -> bool:
    return weight.dtype is torch.bfloat16 and not any(size % _ALIGNMENT for size in weight.shape[1:])


def _grouped(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    out: Tensor = F.grouped_mm(a, b, offs=ends)
    return out


def _groups(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Groups that have rows, and which. The host waits for them."""
    for group, (start, stop) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        if start < stop:
            yield group, slice(start, stop)
