"""`kernels.cross_entropy` and `kernels.divergence` in two passes over logits in their own dtype.

The gradient of the cross-entropy overwrites the logits, that of the divergence overwrites the teacher's.
"""

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


def divergence_statistics(
    student: Tensor, teacher: Tensor, temperature: float, num_real: int, *, is_reversed: bool
) -> Tensor:
    """Return what `kernels.divergence.statistics` does, fp32 [5, t]."""
    assert student.stride(1) == teacher.stride(1) == 1
    rows = len(student)
    out = torch.empty(5, rows, dtype=torch.float32, device=student.device)
    launch(
        _divergence_statistics, (rows,),
        student, teacher, out, student.stride(0), teacher.stride(0), rows, temperature, num_real,
        IS_REVERSED=is_reversed, BLOCK=min(_BLOCK, power_of_two(student.shape[1])), num_warps=8,
    )  # fmt: skip
    return out


def write_divergence_gradient(
    student: Tensor,
    teacher: Tensor,
    log_sums: Tensor,
    losses: Tensor,
    scale: Tensor,
    temperature: float,
    num_real: int,
    *,
    is_reversed: bool,
) -> None:
    """Overwrite the teacher's logits with `kernels.divergence.divergence_gradient`."""
    assert student.stride(1) == teacher.stride(1) == 1
    assert all(x.is_contiguous() for x in (log_sums, losses, scale))
    rows, columns = student.shape
    block = min(_BLOCK, power_of_two(columns))
    launch(
        _divergence_gradient, (rows, cdiv(columns, block)),
        student, teacher, log_sums, losses, scale, student.stride(0), teacher.stride(0), rows, temperature, columns, num_real,
        IS_REVERSED=is_reversed, BLOCK=block, num_warps=8,
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


@jit
def _divergence_statistics(
    STUDENT, TEACHER, OUT, student_stride, teacher_stride, rows, temperature, num_real,
    IS_REVERSED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    largest_s = -3.0e38
    largest_t = -3.0e38
    sum_s = 0.0
    sum_t = 0.0
    difference = 0.0
    for first in range(0, num_real, BLOCK):
        column = first + tl.arange(0, BLOCK)
        is_real = column < num_real
        s = tl.load(STUDENT + row * student_stride + column, mask=is_real, other=0).to(tl.float32)
        t = tl.load(TEACHER + row * teacher_stride + column, mask=is_real, other=0).to(tl.float32)
        s = tl.where(is_real, s / temperature, -1e30)
        t = tl.where(is_real, t / temperature, -1e30)
        higher_s = tl.maximum(largest_s, tl.max(s, axis=0))
        higher_t = tl.maximum(largest_t, tl.max(t, axis=0))
        of_s = tl.exp(s - higher_s)
        of_t = tl.exp(t - higher_t)
        factor_s = tl.exp(largest_s - higher_s)
        factor_t = tl.exp(largest_t - higher_t)
        sum_s = sum_s * factor_s + tl.sum(of_s, axis=0)
        sum_t = sum_t * factor_t + tl.sum(of_t, axis=0)
        if IS_REVERSED:
            difference = difference * factor_s + tl.sum(of_s * (s - t), axis=0)
        else:
            difference = difference * factor_t + tl.sum(of_t * (t - s), axis=0)
        largest_s = higher_s
        largest_t = higher_t
    tl.store(OUT + row, largest_s)
    tl.store(OUT + rows + row, largest_t)
    tl.store(OUT + 2 * rows + row, sum_s)
    tl.store(OUT + 3 * rows + row, sum_t)
    tl.store(OUT + 4 * rows + row, difference)


@jit
def _divergence_gradient(
    STUDENT, TEACHER, LOG_SUM, LOSS, SCALE, student_stride, teacher_stride, rows, temperature, num_columns, num_real,
    IS_REVERSED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = column < num_real
    pointer = TEACHER + row * teacher_stride + column
    s = tl.load(STUDENT + row * student_stride + column, mask=is_real, other=0).to(tl.float32)
    t = tl.load(pointer, mask=is_real, other=0).to(tl.float32)
    log_s = s / temperature - tl.load(LOG_SUM + row)
    log_t = t / temperature - tl.load(LOG_SUM + rows + row)
    if IS_REVERSED:
        gradient = tl.exp(log_s) * (log_s - log_t - tl.load(LOSS + row))
    else:
        gradient = tl.exp(log_s) - tl.exp(log_t)
    gradient = tl.where(is_real, gradient * tl.load(SCALE + row), 0.0)
    # No barrier before the store, as above.
    tl.store(pointer, gradient.to(TEACHER.dtype.element_ty), mask=column < num_columns)
