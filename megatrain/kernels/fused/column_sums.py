"""`kernels.column_sums` in two steps: sums of a few hundred groups of rows, and their sum."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, tl

_ROWS, _COLUMNS = 32, 128
"""Tile size: each row of a tile is 256 contiguous bytes in bf16."""
_PROGRAMS = 132 * 8
"""Number of programs that saturates an H200's memory bandwidth."""


def add_column_sums(total: Tensor, x: Tensor) -> None:
    """Implement `kernels.column_sums.add_column_sums`."""
    x = x.contiguous()
    rows, columns = x.shape
    strips = cdiv(columns, _COLUMNS)
    groups = min(cdiv(rows, _ROWS), cdiv(_PROGRAMS, strips))
    sums = torch.empty(groups, columns, dtype=torch.float32, device=x.device)
    tile = {"ROWS": _ROWS, "COLUMNS": _COLUMNS}
    launch(_sum, (strips, groups), x, sums, rows, columns, groups, ADDS=False, **tile)
    launch(_sum, (strips, 1), sums, total, groups, columns, 1, ADDS=True, **tile)


@jit
def _sum(X, SUMS, rows, columns, groups, ADDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    group = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < columns
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for tile in range(group, tl.cdiv(rows, ROWS), groups):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & is_column[None, :]
        total += tl.load(X + row[:, None] * columns + column[None, :], mask=inside, other=0).to(tl.float32)
    sums = tl.sum(total, axis=0)
    SUMS += group * columns + column
    if ADDS:
        sums += tl.load(SUMS, mask=is_column, other=0)
    tl.store(SUMS, sums.to(SUMS.dtype.element_ty), mask=is_column)
