"""`kernels.linear` for one row: the weight is read once, at the rate of the memory."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, tl

TILE = (2, 2048)
"""Rows of the weight per program, and columns per iteration."""


def matrix_vector(x: Tensor, weight: Tensor, bias: Tensor | None, tile: tuple[int, int] = TILE) -> Tensor:
    """Multiply the rows of `weight` [o, i] by the single row x [..., i]: [..., o]."""
    (rows, columns), (tile_rows, tile_columns), x = weight.shape, tile, x.contiguous()
    assert weight.stride(1) == 1
    y = torch.empty(*x.shape[:-1], rows, dtype=x.dtype, device=x.device)
    launch(
        _multiply, (cdiv(rows, tile_rows),),
        x, weight, weight if bias is None else bias, y, rows, columns, weight.stride(0),
        HAS_BIAS=bias is not None, IS_EVEN=rows % tile_rows == 0 and columns % tile_columns == 0,
        ROWS=tile_rows, BLOCK=tile_columns, num_warps=4,
    )  # fmt: skip
    return y


@jit
def _multiply(
    X, W, B, Y, rows, columns, stride,
    HAS_BIAS: tl.constexpr, IS_EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = W + row.to(tl.int64)[:, None] * stride + column[None, :]
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, columns, BLOCK):
        if IS_EVEN:
            w, x = tl.load(at + first), tl.load(X + first + column)
        else:
            inside = first + column < columns
            w = tl.load(at + first, mask=(row < rows)[:, None] & inside[None, :], other=0)
            x = tl.load(X + first + column, mask=inside, other=0)
        sums += w.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(sums, axis=1)
    if HAS_BIAS:
        y += tl.load(B + row, mask=row < rows, other=0).to(tl.float32)
    tl.store(Y + row, y.to(Y.dtype.element_ty), mask=row < rows)
