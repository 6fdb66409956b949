"""`kernels.column_sums` in two steps: sums of a few hundred runs of rows, and their sum."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, tl

_ROWS, _COLUMNS = 32, 128
"""Of a tile: each of its rows is 256 bytes side by side in bf16."""
_PROGRAMS = 132 * 8
"""That keep an H200's memory busy."""


def add_column_sums(total: Tensor, x: Tensor) -> None:
    """As `kernels.column_sums.add_column_sums`."""
    x = x.contiguous()
    rows, columns = x.shape
    strips = cdiv(columns, _COLUMNS)
    runs = min(cdiv(rows, _ROWS), cdiv(_PROGRAMS, strips))
    sums = torch.empty(runs, columns, dtype=torch.float32, device=x.device)
    launch(_sum, (strips, runs), x, sums, rows, columns, runs, ROWS=_ROWS, COLUMNS=_COLUMNS)
    total.add_(sums.sum(0))


@jit
def _sum(X, SUMS, rows, columns, runs, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    run = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < columns
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for tile in range(run, tl.cdiv(rows, ROWS), runs):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & is_column[None, :]
        total += tl.load(X + row[:, None] * columns + column[None, :], mask=inside, other=0).to(tl.float32)
    tl.store(SUMS + run * columns + column, tl.sum(total, axis=0), mask=is_column)
