"""Rows read by number and sums of them, as `kernels.permute` needs them, each in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, power_of_two, tl

_COLUMNS = 1024
"""Columns that a program moves."""


def rows_at(x: Tensor, index: Tensor) -> Tensor:
    """As `kernels.permute.rows_at_reference`."""
    return sums_at(x, index[:, None])


def sums_at(x: Tensor, index: Tensor) -> Tensor:
    """As `kernels.permute.sums_at_reference`."""
    x, index = x.contiguous(), index.contiguous()
    num_rows, terms = index.shape
    columns = x.shape[1]
    out = torch.empty(num_rows, columns, dtype=x.dtype, device=x.device)
    block = min(power_of_two(columns), _COLUMNS)
    launch(_sum_rows, (num_rows, cdiv(columns, block)), x, index, out, columns, TERMS=terms, BLOCK=block)
    return out


@jit
def _sum_rows(X, INDEX, OUT, columns, TERMS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for term in range(TERMS):
        source = tl.load(INDEX + row * TERMS + term)
        width = tl.where(source < 0, 0, columns)
        total += tl.load(X + source * columns + place, mask=place < width, other=0).to(tl.float32)
    tl.store(OUT + row * columns + place, total.to(OUT.dtype.element_ty), mask=place < columns)
