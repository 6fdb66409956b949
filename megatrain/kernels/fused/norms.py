"""`kernels.norms` in one pass each way: residual addition, norm, and their gradients.

A tile of rows stays in registers. The gradients of weight and bias are summed over a program's tiles; those of the programs are
rows for a second, small sum: the result is deterministic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, power_of_two, tl

_TILE = 2048
"""Elements per tile, unless a row is longer."""
_WARPS = 132 * 16
"""Maximum warps of the backward pass: an H200's multiprocessors hold them all at once, with at most 128 registers a thread."""


def norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Implement `kernels.norms.norm`."""
    assert all(part is None or part.is_contiguous() for part in (weight, bias))
    x = x.contiguous()
    columns = x.shape[-1]
    total = x if delta is None else torch.empty_like(x)
    y = torch.empty_like(x, dtype=weight.dtype)
    rstd = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    mean = None if bias is None else torch.empty_like(rstd)
    rows, block, warps = _tile(columns)
    count = x.numel() // columns
    has_terms = delta is not None and delta.dim() > x.dim()
    deltas = (
        (x, x) if delta is None else delta.contiguous().unbind() if has_terms else (delta.contiguous(), x)
    )
    launch(
        _forward, (cdiv(count, rows),),
        x, *deltas, weight, weight if bias is None else bias,
        total, y, rstd if mean is None else mean, rstd, count, columns, eps, offset,
        HAS_DELTA=delta is not None, HAS_TERMS=has_terms, IS_CENTRED=bias is not None,
        ROWS=rows, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return total, y, mean, rstd


def add_terms(x: Tensor, terms: Tensor) -> Tensor:
    """Implement `kernels.norms.add_terms`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    count = x.numel()
    launch(
        _add_terms,
        (cdiv(count, _TILE),),
        x,
        *terms.contiguous().unbind(),
        out,
        count,
        BLOCK=_TILE,
        num_warps=8,
    )
    return out


def norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    offset: float,
    dy_term: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Implement `kernels.norms.norm_backward`."""
    assert all(part is None or part.is_contiguous() for part in (weight, mean, rstd, dy_term))
    x = x.contiguous()
    columns = x.shape[-1]
    dx = torch.empty_like(x)
    rows, block, warps = _tile(columns)
    count = x.numel() // columns
    programs = min(cdiv(count, rows), _WARPS // warps)
    sums = torch.empty(
        programs, columns if mean is None else 2 * columns, dtype=torch.float32, device=x.device
    )
    launch(
        _backward, (programs,),
        dy.contiguous(), dy if dy_term is None else dy_term, dy if dtotal is None else dtotal.contiguous(),
        x, weight, rstd if mean is None else mean, rstd, dx, sums,
        count, columns, offset, programs,
        HAS_TERM=dy_term is not None, HAS_TOTAL=dtotal is not None, IS_CENTRED=mean is not None,
        ROWS=rows, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return dx, sums


def _tile(columns: int) -> tuple[int, int, int]:
    """Return rows, padded columns and warps of a program's tile."""
    block = power_of_two(columns)
    rows = max(_TILE // block, 1)
    return rows, block, min(max(rows * block // 512, 4), 16)


@jit
def _add_terms(X, A, B, OUT, count, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    total = _rounded_sum(tl.load(A + index, mask=inside).to(tl.float32), A, B, index, inside)
    total += tl.load(X + index, mask=inside).to(tl.float32)
    tl.store(OUT + index, total.to(OUT.dtype.element_ty), mask=inside)


@jit
def _rounded_sum(term, A, B, index, inside):
    """Add an element of B to one of A in fp32, and round the sum as one in memory is."""
    total = term + tl.load(B + index, mask=inside, other=0).to(tl.float32)
    return total.to(A.dtype.element_ty).to(tl.float32)


@jit
def _forward(
    X, D, D2, W, B, T, Y, M, R, count, columns, eps, offset,
    HAS_DELTA: tl.constexpr, HAS_TERMS: tl.constexpr, IS_CENTRED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    index = row[:, None] * columns + column[None, :]
    inside = (row < count)[:, None] & (column < columns)[None, :]
    x = tl.load(X + index, mask=inside, other=0).to(tl.float32)
    if HAS_DELTA:
        delta = tl.load(D + index, mask=inside, other=0).to(tl.float32)
        if HAS_TERMS:
            delta = _rounded_sum(delta, D, D2, index, inside)
        total = (x + delta).to(T.dtype.element_ty)
        tl.store(T + index, total, mask=inside)
        x = total.to(tl.float32)
    if IS_CENTRED:
        mean = tl.sum(x, axis=1) / columns
        tl.store(M + row, mean, mask=row < count)
        x = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1 / tl.sqrt(tl.sum(x * x, axis=1) / columns + eps)
    tl.store(R + row, rstd, mask=row < count)
    weight = tl.load(W + column, mask=column < columns, other=0).to(tl.float32) + offset
    y = x * rstd[:, None] * weight[None, :]
    if IS_CENTRED:
        y += tl.load(B + column, mask=column < columns, other=0).to(tl.float32)[None, :]
    tl.store(Y + index, y.to(Y.dtype.element_ty), mask=inside)


@jit
def _backward(
    DY, DY2, DT, X, W, M, R, DX, SUMS, count, columns, offset, programs,
    HAS_TERM: tl.constexpr, HAS_TOTAL: tl.constexpr, IS_CENTRED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    is_column = column < columns
    dweight = tl.zeros((BLOCK,), dtype=tl.float32)
    dbias = tl.zeros((BLOCK,), dtype=tl.float32)
    for tile in range(first, tl.cdiv(count, ROWS), programs):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        is_row = row < count
        index = row[:, None] * columns + column[None, :]
        inside = is_row[:, None] & is_column[None, :]
        x = tl.load(X + index, mask=inside, other=0).to(tl.float32)
        rstd = tl.load(R + row, mask=is_row, other=0)[:, None]
        if HAS_TOTAL:  # before the sums over the row, which later loads would wait for
            dtotal = tl.load(DT + index, mask=inside, other=0)
        if IS_CENTRED:
            x = tl.where(inside, x - tl.load(M + row, mask=is_row, other=0)[:, None], 0.0)
        normed = x * rstd
        dy = tl.load(DY + index, mask=inside, other=0).to(tl.float32)
        if HAS_TERM:
            dy = _rounded_sum(dy, DY, DY2, index, inside)
        dweight += tl.sum(dy * normed, axis=0)
        if IS_CENTRED:
            dbias += tl.sum(dy, axis=0)
        weight = (
            tl.load(W + column, mask=is_column, other=0).to(tl.float32) + offset
        )  # again: registers are few
        dnormed = dy * weight[None, :]
        along = tl.sum(dnormed * normed, axis=1) / columns
        dx = dnormed - normed * along[:, None]
        if IS_CENTRED:
            dx -= (tl.sum(dnormed, axis=1) / columns)[:, None]
        dx *= rstd
        if HAS_TOTAL:
            dx += dtotal.to(tl.float32)
        tl.store(DX + index, dx.to(DX.dtype.element_ty), mask=inside)
    SUMS += first * (2 if IS_CENTRED else 1) * columns + column
    tl.store(SUMS, dweight, mask=is_column)
    if IS_CENTRED:
        tl.store(SUMS + columns, dbias, mask=is_column)
