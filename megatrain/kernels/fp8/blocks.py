"""Casts to FP8 with a scale per block, and their GEMMs: the recipes of DeepSeek-V3 and of MXFP8.

    inputs, gradients    blocks of 1 x 128, along the inner dimension of the GEMM; MXFP8: 1 x 32
    weights              blocks of 128 x 128; MXFP8: 1 x 32

A scale is a power of two, so that it changes no mantissa. A matrix of inputs is an operand of two GEMMs with different
inner dimensions, and has other blocks in each: one read of it writes both casts. Blocks at the end of a row are smaller.

Scales of row blocks lie as [k / 128, n] and the scales of square blocks as [n / 128, k / 128 padded to 4]: the order that
cuBLAS reads. GEMMs of MXFP8 are emulated: only Blackwell GPUs have them. Sources: DeepSeek-V3, arXiv:2412.19437, section 3.3.2;
OCP Microscaling Formats (MX) 1.0; Transformer Engine's Float8BlockScaling and MXFP8BlockScaling.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fp8.gemms import Operand
from megatrain.kernels.fp8.quantize import encode, transposed
from megatrain.kernels.fused.fp8_scales import blocks as fused
from megatrain.kernels.fused.launching import cdiv, is_fake, is_fused

BLOCK: Final = 128
"""Elements per block on a side; the only size that cuBLAS multiplies. The emulation takes any."""
LARGEST_SCALE: Final = 2.0**126
"""The inverse of a larger power of two is no normal number."""
SCALES_MULTIPLE: Final = 4


class Cast(NamedTuple):
    """A matrix [r, c] in FP8 as the operand of two GEMMs, or of one of them."""

    rows: Operand | None
    """[r, c], for an inner dimension c."""
    columns: Operand | None
    """Transposed, [c, r], for an inner dimension r."""


def power_of_two_scale(amax: Tensor, largest: float) -> Tensor:
    """Return the largest power of two that maps `amax` into the format, fp32; 1 for 0, NaN and infinity.

    Args:
        amax: largest absolute values of blocks, fp32.
        largest: largest number of the FP8 format.
    """
    scale = (torch.full_like(amax, largest) / amax).clamp(max=LARGEST_SCALE)
    power = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(amax.isfinite() & (amax > 0), power, 1.0)


def cast_blocks(
    x: Tensor, dtype: torch.dtype, block: int = BLOCK, *, rows: bool = True, columns: bool = True
) -> Cast:
    """Cast a matrix with a scale per 1 x `block` elements along each inner dimension: `x` is [r, c]."""
    if is_fused(x):
        return _as_cast(fused.cast_blocks(x, dtype, block, rows, columns))
    return Cast(
        _row_blocks(x, dtype, block) if rows else None,
        _row_blocks(x.t().contiguous(), dtype, block) if columns else None,
    )


def cast_square_blocks(
    x: Tensor, dtype: torch.dtype, block: int = BLOCK, *, rows: bool = True, columns: bool = True
) -> Cast:
    """Cast a matrix with a scale per `block` x `block` elements, the same in both orders: `x` is [r, c]."""
    if is_fused(x):
        return _as_cast(fused.cast_square_blocks(x, dtype, block, rows, columns))
    r, c = x.shape
    tiles = _padded(x, block, block).unflatten(1, (-1, block)).unflatten(0, (-1, block))
    scale = power_of_two_scale(tiles.abs().amax(dim=(1, 3)).float(), torch.finfo(dtype).max)
    factor = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[:r, :c]
    codes = encode(x.to(accumulation_dtype(x.dtype)) * factor, dtype)
    inverse = scale.reciprocal()
    return Cast(
        Operand(codes, _padded(inverse, 1, SCALES_MULTIPLE)) if rows else None,
        Operand(transposed(codes), _padded(inverse.t(), 1, SCALES_MULTIPLE)) if columns else None,
    )


def _row_blocks(x: Tensor, dtype: torch.dtype, block: int) -> Operand:
    tiles = _padded(x, 1, block).unflatten(1, (-1, block))
    scale = power_of_two_scale(tiles.abs().amax(dim=2).float(), torch.finfo(dtype).max)
    factor = scale.repeat_interleave(block, 1)[:, : x.shape[1]]
    codes = encode(x.to(accumulation_dtype(x.dtype)) * factor, dtype)
    return Operand(codes, scale.reciprocal().t().contiguous())


def _padded(x: Tensor, row_multiple: int, column_multiple: int) -> Tensor:
    """Return x with zeros after its rows and columns."""
    r, c = x.shape
    return F.pad(x, (0, -c % column_multiple, 0, -r % row_multiple)).contiguous()


def _as_cast(parts: tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]) -> Cast:
    rows, columns = parts
    return Cast(rows and Operand(*rows), columns and Operand(*columns))


def block_gemm(
    a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None, block: int = BLOCK
) -> Tensor:
    """Return a b^T + bias in `dtype`: [m, k] in row blocks, [n, k] in square blocks -> [m, n]."""
    if not a.codes.is_cuda or dtype is torch.float64:
        wide = accumulation_dtype(dtype)
        n, k = b.codes.shape
        factor = b.scale[:, : cdiv(k, block)].repeat_interleave(block, 0).repeat_interleave(block, 1)[:n, :k]
        out = _decoded(a, wide, block) @ (b.codes.to(wide) * factor).t()
        return (out if bias is None else out + bias).to(dtype)
    assert block == BLOCK, f"cuBLAS multiplies blocks of {BLOCK}, not of {block}"
    out = _multiplied(a, b, F.ScalingType.BlockWise128x128, dtype)
    return out if bias is None else out.add_(bias)


def row_block_gemm_reference(
    a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None, block: int
) -> Tensor:
    """Compute a b^T + bias with torch operators, both in row blocks: [m, k], [n, k] -> [m, n]."""
    wide = accumulation_dtype(dtype)
    out = _decoded(a, wide, block) @ _decoded(b, wide, block).t()
    return (out if bias is None else out + bias).to(dtype)


def accumulate_block_gemm(
    total: Tensor, a: Operand, b: Operand, block: int = BLOCK, *, is_zero: bool = False
) -> None:
    """Compute total += a b^T, both in row blocks, in the dtype of `total`: fp32 or fp64.

    Args:
        is_zero: `total` is zero or undefined, and is overwritten.
    """
    if not a.codes.is_cuda or total.dtype is torch.float64:
        product = _decoded(a, total.dtype, block) @ _decoded(b, total.dtype, block).t()
        total.copy_(product) if is_zero else total.add_(product)
        return
    assert block == BLOCK, f"cuBLAS multiplies blocks of {BLOCK}, not of {block}"
    if is_zero:
        _multiplied(a, b, F.ScalingType.BlockWise1x128, total.dtype, out=total)
    else:
        total += _multiplied(a, b, F.ScalingType.BlockWise1x128, total.dtype)


def _decoded(a: Operand, dtype: torch.dtype, block: int) -> Tensor:
    """Return the values of a cast in row blocks."""
    n, k = a.codes.shape
    return a.codes.to(dtype) * a.scale.t().repeat_interleave(block, 1)[:n, :k]


def _multiplied(
    a: Operand, b: Operand, scaling: F.ScalingType, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Compute a b^T with cuBLAS, which adds the products of each block in fp32. Only Hopper GPUs do."""
    if out is None:
        out = a.codes.new_empty(a.codes.shape[0], b.codes.shape[0], dtype=dtype)
    if is_fake(out):
        return out
    row_blocks = F.ScalingType.BlockWise1x128
    torch._scaled_mm_v2(  # noqa: SLF001 (the public name, `F.scaled_mm`, takes no `out`)
        a.codes, b.codes.t(), [a.scale.t()], [row_blocks.value], [], [b.scale.t()], [scaling.value], [], None, dtype,
        out=out,
    )  # fmt: skip
    return out
