"""Casts to FP8 with a scale per row, and their grouped GEMMs: routed experts.

    rows of x, sorted by group      y[rows of g] = x[rows of g] W_g^T      a scale per row of x, and per row of each W_g

A scale per row needs no other row: it does not depend on the tokens that a rank receives, nor on their order, so that a row may
be cast before it is sent. Scales are powers of two. Rows after the last end are not read by GEMMs, and results have undefined values there.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fp8.blocks import power_of_two_scale
from megatrain.kernels.fp8.quantize import encode
from megatrain.kernels.fused.fp8_scales import rows as fused
from megatrain.kernels.fused.launching import is_fake, is_fused
from megatrain.kernels.moe.grouped_gemm import groups_of

FORMAT: Final = torch.float8_e4m3fn
"""The range of a row needs no more exponents."""
SCALE_BYTES: Final = 32
"""Bytes of a scale in a packed row: rows of pairs of bytes then are multiples of 16 pairs, for which kernels load 16 bytes at a time."""


class RowCast(NamedTuple):
    """Rows in FP8, contiguous along the inner dimension of a GEMM."""

    codes: Tensor
    """[..., k]."""
    scale: Tensor
    """Inverse scales, fp32 [...]."""


def row_amax(x: Tensor) -> Tensor:
    """Return the largest absolute value of each row, fp32: [..., k] -> [...]."""
    return fused.row_amax(x) if is_fused(x) else x.abs().amax(dim=-1).float()


def cast_rows(x: Tensor, amax: Tensor | None = None) -> RowCast:
    """Cast each row with a scale of its own.

    Args:
        x: [..., k].
        amax: largest absolute values of the rows, if other ranks hold parts of them; fp32 [...].
    """
    if is_fused(x):
        return RowCast(*fused.cast_rows(x, amax, FORMAT))
    amax = row_amax(x) if amax is None else amax
    scale = power_of_two_scale(amax, torch.finfo(FORMAT).max)
    codes = encode(x.to(accumulation_dtype(x.dtype)) * scale[..., None], FORMAT)
    return RowCast(codes, scale.reciprocal())


def decode_rows(cast: RowCast, dtype: torch.dtype) -> Tensor:
    """Return the values of a cast. In the dtype of the rows that were cast they are exact, and casting them changes none."""
    if is_fused(cast.codes) and dtype is not torch.float64:
        return fused.decode_rows(*cast, dtype)
    return (cast.codes.to(accumulation_dtype(dtype)) * cast.scale[..., None]).to(dtype)


def pack_rows(cast: RowCast) -> Tensor:
    """Return codes and scale of each row in one row of bytes, [n, k + 32]: the scale ends it, several times."""
    scales = cast.scale[:, None].repeat(1, SCALE_BYTES // 4)
    return torch.cat((cast.codes.view(torch.uint8), scales.view(torch.uint8)), dim=1)


def unpack_rows(packed: Tensor) -> RowCast:
    """Return the cast in rows of bytes; its codes are a view."""
    codes, scales = packed.split((packed.shape[1] - SCALE_BYTES, SCALE_BYTES), dim=1)
    return RowCast(codes.view(FORMAT), scales.contiguous().view(torch.float32)[:, 0])


def grouped_gemm(x: RowCast, weight: RowCast, ends: Tensor, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """Multiply each row by the weight of its group: [r, k] -> [r, n].

    Args:
        weight: [e, n, k].
        ends: end of each group's rows, int32 [e].
        dtype: dtype of the result; bf16 on GPUs takes one kernel, and the host does not wait for `ends`.
        fast: the tensor cores keep fewer bits of partial sums, for forward passes.
    """
    if is_fake(x.codes):
        return x.codes.new_empty(x.codes.shape[0], weight.codes.shape[1], dtype=dtype)
    if not x.codes.is_cuda or dtype is not torch.bfloat16:  # group by group
        wide = accumulation_dtype(dtype)
        out = x.codes.new_empty(x.codes.shape[0], weight.codes.shape[1], dtype=dtype)
        for group, rows in groups_of(ends):
            sums = x.codes[rows].to(wide) @ weight.codes[group].to(wide).t()
            out[rows] = (sums * x.scale[rows, None] * weight.scale[group]).to(dtype)
        return out
    out = torch._scaled_grouped_mm(  # noqa: SLF001 (`F.scaled_grouped_mm` calls it)
        x.codes,
        weight.codes.transpose(1, 2),
        x.scale,
        weight.scale,
        offs=ends,
        out_dtype=dtype,
        use_fast_accum=fast,
    )
    return out
