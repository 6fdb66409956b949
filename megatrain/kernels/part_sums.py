"""Sums of parts that ranks sent into one memory, and this rank's own part."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fused import part_sums as fused
from megatrain.kernels.fused.launching import is_fused


def sum_parts(parts: Tensor, own: Tensor, number: int, out: Tensor) -> None:
    """Sum parts, [size, n, ...], with `own`, [n, ...], in place of part `number`: -> `out`, [n, ...], which may be `own`.

    Parts are added in their order, 16-bit ones in fp32, and rounded once. All tensors are contiguous.
    """
    if is_fused(own):
        fused.sum_parts(parts, own, number, out)
    else:
        sum_parts_reference(parts, own, number, out)


def sum_parts_reference(parts: Tensor, own: Tensor, number: int, out: Tensor) -> None:
    """Sum with torch operators."""
    total = torch.zeros_like(own, dtype=accumulation_dtype(own.dtype))
    for k, part in enumerate(parts):
        total += own if k == number else part
    out.copy_(total)
