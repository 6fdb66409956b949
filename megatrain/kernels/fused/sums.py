"""Kernels of `kernels.sums`."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, tl

_ROWS, _COLUMNS = 32, 128
"""Tile size: each row of a tile is 256 contiguous bytes in bf16."""
_FEW_ROWS = 1024
"""As many rows, as kernels leave them, are summed by one launch, a program for every 8 columns."""
_FEW_COLUMNS = 8
PROGRAMS = 132 * 8
"""Number of programs that saturates an H200's memory bandwidth."""
_BLOCK = 2048
"""Values of a program that sums parts."""


def add_column_sums(total: Tensor, x: Tensor, second: Tensor | None = None) -> None:
    """Implement `kernels.sums.add_column_sums`; of many rows sums of at most a few hundred groups, and their sum."""
    x = x.contiguous()
    rows, columns = x.shape
    if rows > _FEW_ROWS:
        strips = cdiv(columns, _COLUMNS)
        groups = min(cdiv(rows, _ROWS), cdiv(PROGRAMS, strips))
        sums = torch.empty(groups, columns, dtype=torch.float32, device=x.device)
        launch(
            _sum, (strips, groups), x, sums, x, rows, columns, 0, groups,
            ADDS=False, HAS_SECOND=False, ROWS=_ROWS, COLUMNS=_COLUMNS,
        )  # fmt: skip
        x, rows = sums, groups
    launch(
        _sum, (cdiv(columns, _FEW_COLUMNS), 1), x, total, total if second is None else second, rows, columns, total.numel(), 1,
        ADDS=True, HAS_SECOND=second is not None, ROWS=128, COLUMNS=_FEW_COLUMNS, num_warps=8,
    )  # fmt: skip


@jit
def _sum(
    X, SUMS, SECOND, rows, columns, columns_before, groups,
    ADDS: tl.constexpr, HAS_SECOND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < columns
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for tile in range(group, tl.cdiv(rows, ROWS), groups):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & is_column[None, :]
        total += tl.load(X + row[:, None] * columns + column[None, :], mask=inside, other=0).to(tl.float32)
    sums = tl.sum(total, axis=0)
    if HAS_SECOND:
        is_second = is_column & (column >= columns_before)
        is_column &= column < columns_before
        SECOND += column - columns_before
        total_of_second = sums + tl.load(SECOND, mask=is_second, other=0)
        tl.store(SECOND, total_of_second.to(SECOND.dtype.element_ty), mask=is_second)
    SUMS += group * columns + column
    if ADDS:
        sums += tl.load(SUMS, mask=is_column, other=0)
    tl.store(SUMS, sums.to(SUMS.dtype.element_ty), mask=is_column)


def sum_parts(parts: Tensor, own: Tensor, number: int, out: Tensor) -> None:
    """Implement `kernels.sums.sum_parts`."""
    assert all(part.is_contiguous() for part in (parts, own, out))
    count = own.numel()
    launch(
        _sum_parts, (cdiv(count, _BLOCK),), own, parts, out, count,
        NUMBER=number, SIZE=parts.shape[0], BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


@jit
def _sum_parts(OWN, PARTS, OUT, count, NUMBER: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(SIZE):
        source = OWN if part == NUMBER else PARTS + part * count.to(tl.int64)
        total += tl.load(source + index, mask=inside, other=0).to(tl.float32)
    tl.store(OUT + index, total.to(OUT.dtype.element_ty), mask=inside)
