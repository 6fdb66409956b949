"""`kernels.softmax` in two passes over logits that stay in their own dtype; the gradient takes their place."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, power_of_two, tl

_BLOCK = 4096


def logit_statistics(logits: Tensor, columns: Tensor, num_real: int) -> tuple[Tensor, Tensor, Tensor]:
    """Largest logit, sum of exponentials less it, target's logit: fp32 [t] each, as in `kernels.softmax.Rows`."""
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
    logits: Tensor, log_sums: Tensor, columns: Tensor, share: Tensor, minus: Tensor, num_real: int
) -> None:
    """Put share * softmax - minus * onehot where the logits are."""
    assert logits.stride(1) == 1
    assert all(x.is_contiguous() for x in (log_sums, columns, share, minus))
    rows, num_columns = logits.shape
    block = min(_BLOCK, power_of_two(num_columns))
    launch(
        _gradient, (rows, cdiv(num_columns, block)),
        logits, log_sums, columns, share, minus, logits.stride(0), num_columns, num_real, BLOCK=block, num_warps=8,
    )  # fmt: skip


@jit
def _statistics(X, COLUMN, LARGEST, SUM, TARGET, stride, num_real, BLOCK: tl.constexpr):
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
    tl.store(LARGEST + row, largest)
    tl.store(SUM + row, total)
    column = tl.load(COLUMN + row)
    is_here = column >= 0
    tl.store(TARGET + row, tl.load(start + column, mask=is_here, other=0).to(tl.float32))


@jit
def _gradient(X, LOG_SUM, COLUMN, SHARE, MINUS, stride, num_columns, num_real, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = X + row * stride + column
    x = tl.load(place, mask=column < num_real, other=float("-inf")).to(tl.float32)
    gradient = tl.exp(x - tl.load(LOG_SUM + row)) * tl.load(SHARE + row)
    # No barrier before the store: of the threads that hold an element one stores it, and nobody needs what others read then.
    gradient = tl.where(column == tl.load(COLUMN + row), gradient - tl.load(MINUS + row), gradient)
    tl.store(place, gradient.to(X.dtype.element_ty), mask=column < num_columns)
