"""`kernels.cross_entropy` in two passes over logits in their own dtype; the gradient overwrites them."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, power_of_two, tl

_BLOCK = 4096


def logit_statistics(logits: Tensor, columns: Tensor, num_real: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return maximum, sum of exponentials and target logit, fp32 [t] each, as `kernels.cross_entropy.LogitStatistics` has them."""
    assert logits.stride(1) == 1
    assert columns.is_contiguous()
    rows, stride = logits.shape[0], logits.stride(0)
    largest, sums, targets = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    block = min(_BLOCK, power_of_two(logits.shape[1]))
    launch(
        _statistics,
        (rows,),
        logits,
        columns,
        largest,
        sums,
        targets,
        stride,
        num_real,
        BLOCK=block,
        num_warps=8,
    )
    return largest, sums, targets


def write_gradient(
    logits: Tensor,
    log_sums: Tensor,
    columns: Tensor,
    softmax_scale: Tensor,
    onehot_scale: Tensor,
    num_real: int,
) -> None:
    """Overwrite `logits` with softmax_scale * softmax - onehot_scale * onehot."""
    assert logits.stride(1) == 1
    assert all(x.is_contiguous() for x in (log_sums, columns, softmax_scale, onehot_scale))
    rows, num_columns = logits.shape
    block = min(_BLOCK, power_of_two(num_columns))
    launch(
        _gradient, (rows, cdiv(num_columns, block)),
        logits, log_sums, columns, softmax_scale, onehot_scale, logits.stride(0), num_columns, num_real, BLOCK=block, num_warps=8,
    )  # fmt: skip


@jit
def _statistics(X, COLUMN, MAX, SUM_EXP, TARGET, stride, num_real, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = X + row * stride
    largest = -3.0e38
    total = 0.0
    for first in range(0, num_real, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(start + column, mask=column < num_real, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(x - higher), axis=0)
        largest = higher
    tl.store(MAX + row, largest)
    tl.store(SUM_EXP + row, total)
    column = tl.load(COLUMN + row)
    is_here = column >= 0
    tl.store(TARGET + row, tl.load(start + column, mask=is_here, other=0).to(tl.float32))


@jit
def _gradient(
    X, LOG_SUM, COLUMN, SOFTMAX_SCALE, ONEHOT_SCALE, stride, num_columns, num_real, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pointer = X + row * stride + column
    x = tl.load(pointer, mask=column < num_real, other=float("-inf")).to(tl.float32)
    gradient = tl.exp(x - tl.load(LOG_SUM + row)) * tl.load(SOFTMAX_SCALE + row)
    # No barrier before the store: one of the threads that hold an element stores it, and values that others read later are unused.
    gradient = tl.where(column == tl.load(COLUMN + row), gradient - tl.load(ONEHOT_SCALE + row), gradient)
    tl.store(pointer, gradient.to(X.dtype.element_ty), mask=column < num_columns)
