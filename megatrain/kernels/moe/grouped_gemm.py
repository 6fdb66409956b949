"""Grouped GEMM: products of rows with the weight of their group, such as an expert.

    rows of x, sorted by group     y[rows of g] = x[rows of g] W_g^T        ends: end of the rows of each group

In bf16 one kernel computes all groups, and the host does not wait for `ends` (on Hopper and Blackwell GPUs; on others torch
reads them); in other dtypes the groups are computed one by one. On GPUs a fused kernel adds weight gradients to their fp32 sums. Rows after the last end are not read, and results have undefined values there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.kernels.fused import grouped_gemm as fused
from megatrain.kernels.fused.launching import is_fused
from megatrain.kernels.linear import accumulate_weight_gradient

_ALIGNMENT = 8
"""Elements; a single kernel needs widths that are multiples of it."""


def grouped_gemm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each row by the weight of its group.

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
    for group, rows in groups_of(ends):
        torch.mm(x[rows], weight[group].t(), out=out[rows])
    return out


def grouped_gemm_backward(dy: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient of x: [r, o] -> [r, i]."""
    if _is_one_kernel(weight):
        return _grouped(dy, weight, ends)
    dx = dy.new_empty(dy.shape[0], weight.shape[2])
    for group, rows in groups_of(ends):
        torch.mm(dy[rows], weight[group], out=dx[rows])
    return dx


class GroupedProducts:
    """The products of rows with expert weights, in the dtype of the weights; a subclass has them in FP8."""

    def cast(self, rows: Tensor) -> Any:
        """Return rows as `fc1` reads them."""
        return rows

    def saved(self, rows: Tensor, _cast: Any) -> tuple[Tensor, ...]:
        """Return what a pass saves of the rows of fc1, for their weight gradient."""
        return (rows,)

    def restored(self, saved: Sequence[Tensor], _dtype: torch.dtype) -> Tensor:
        """Return these rows from what is saved."""
        return saved[0]

    def fc1(self, rows: Any, weight: Tensor, ends: Tensor, _info: Any) -> Tensor:
        """Return `grouped_gemm`. A subclass reads the pass of the micro-batch, `PassInfo`: the first one has new weights."""
        return grouped_gemm(rows, weight, ends)

    def fc1_backward(self, dy: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Return `grouped_gemm_backward`."""
        return grouped_gemm_backward(dy, weight, ends)

    fc2, fc2_backward = fc1, fc1_backward


def accumulate_grouped_weight_gradient(grad: Tensor, dy: Tensor, x: Tensor, ends: Tensor) -> None:
    """Compute grad[g] += dy[rows of g]^T x[rows of g], [e, o, i]; torch's grouped kernel rounds each product to bf16 first."""
    if is_fused(x) and x.element_size() == 2 and grad.dtype is torch.float32:
        fused.accumulate_weight_gradients(grad, dy, x, ends)
        return
    if _is_one_kernel(x) and dy.shape[-1] % _ALIGNMENT == 0:
        grad.add_(_grouped(dy.t(), x, ends))
        return
    for group, rows in groups_of(ends):
        accumulate_weight_gradient(grad[group], dy[rows], x[rows])


def _is_one_kernel(weight: Tensor) -> bool:
    return weight.dtype is torch.bfloat16 and not any(size % _ALIGNMENT for size in weight.shape[1:])


def _grouped(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    out: Tensor = F.grouped_mm(a, b, offs=ends)
    return out


def groups_of(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the groups that have rows, and their rows; the host waits for `ends`."""
    for group, (start, stop) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        if start < stop:
            yield group, slice(start, stop)
