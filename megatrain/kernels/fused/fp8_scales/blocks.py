"""`kernels.fp8.blocks` in Triton: one read of a tile of 128 x 128 elements gives all scales and codes of its blocks.

Absolute values and scales are handled as the bits of fp32 numbers: without sign they have their order, NaN is the largest, and
an exponent is a power of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.fused.fp8_scales.tensors import FORMATS, magnitude_bits
from megatrain.kernels.fused.launching import cdiv, jit, launch, tl

_WARPS = 8
_SCALES_MULTIPLE = 4
CodesAndScales = tuple[Tensor, Tensor]


def cast_blocks(
    x: Tensor, dtype: torch.dtype, block: int, rows: bool, columns: bool
) -> tuple[CodesAndScales | None, CodesAndScales | None]:
    """Implement `kernels.fp8.blocks.cast_blocks`."""
    r, c = x.shape
    return _cast(x, dtype, block, (cdiv(c, block), r) if rows else None, (cdiv(r, block), c) if columns else None, False)  # fmt: skip


def cast_square_blocks(
    x: Tensor, dtype: torch.dtype, block: int, rows: bool, columns: bool
) -> tuple[CodesAndScales | None, CodesAndScales | None]:
    """Implement `kernels.fp8.blocks.cast_square_blocks`."""
    down, across = (cdiv(size, block) for size in x.shape)
    padded = [cdiv(size, _SCALES_MULTIPLE) * _SCALES_MULTIPLE for size in (down, across)]
    return _cast(x, dtype, block, (down, padded[1]) if rows else None, (across, padded[0]) if columns else None, True)  # fmt: skip


def _cast(
    x: Tensor,
    dtype: torch.dtype,
    block: int,
    row_scales: tuple[int, int] | None,
    column_scales: tuple[int, int] | None,
    is_square: bool,
) -> tuple[CodesAndScales | None, CodesAndScales | None]:
    """Cast; `row_scales`, `column_scales` are the shapes of the scales of both orders, None for one that is not written."""
    x = x.contiguous()
    r, c = x.shape

    def outputs(shape: tuple[int, int], scales: tuple[int, int]) -> CodesAndScales:
        new_scales = x.new_zeros if is_square else x.new_empty  # scales of squares have a padding
        return torch.empty(shape, dtype=dtype, device=x.device), new_scales(scales, dtype=torch.float32)

    rows = None if row_scales is None else outputs((r, c), row_scales)
    columns = None if column_scales is None else outputs((c, r), column_scales)
    any_outputs = rows or columns
    assert any_outputs is not None, "nothing to write"
    codes, scale = rows or any_outputs
    transposed, transposed_scale = columns or any_outputs
    launch(
        _cast_tile, (cdiv(r, block), cdiv(c, block)), x, codes.view(torch.uint8), scale, transposed.view(torch.uint8),
        transposed_scale, r, c, scale.shape[1], transposed_scale.shape[1], torch.finfo(dtype).max, FORMAT=FORMATS.get(dtype),
        WRITES_ROWS=rows is not None, WRITES_COLUMNS=columns is not None, IS_SQUARE=is_square, BLOCK=block, num_warps=_WARPS,
    )  # fmt: skip
    return rows, columns


@jit
def _cast_tile(
    X, CODES, SCALE, TRANSPOSED, TRANSPOSED_SCALE, r, c, scale_stride, transposed_scale_stride, largest, FORMAT: tl.constexpr,
    WRITES_ROWS: tl.constexpr, WRITES_COLUMNS: tl.constexpr, IS_SQUARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    down, across = tl.program_id(0), tl.program_id(1)
    row = tl.cast(down, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.cast(across, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < r)[:, None] & (column < c)[None, :]
    x = tl.load(X + row[:, None] * c + column[None, :], mask=inside, other=0).to(tl.float32)
    bits = magnitude_bits(x)
    if IS_SQUARE:
        power = power_bits(tl.max(tl.max(bits, axis=1), axis=0), largest)
        codes = encoded(x * power.to(tl.float32, bitcast=True), largest, FORMAT)
        inverse = (0x7F000000 - power).to(tl.float32, bitcast=True)
        if WRITES_ROWS:
            tl.store(CODES + row[:, None] * c + column[None, :], codes, mask=inside)
            tl.store(SCALE + down * scale_stride + across, inverse)
        if WRITES_COLUMNS:
            tl.store(TRANSPOSED + column[:, None] * r + row[None, :], tl.trans(codes), mask=tl.trans(inside))
            tl.store(TRANSPOSED_SCALE + across * transposed_scale_stride + down, inverse)
    else:
        if WRITES_ROWS:
            power = power_bits(tl.max(bits, axis=1), largest)
            codes = encoded(x * power.to(tl.float32, bitcast=True)[:, None], largest, FORMAT)
            inverse = (0x7F000000 - power).to(tl.float32, bitcast=True)
            tl.store(CODES + row[:, None] * c + column[None, :], codes, mask=inside)
            tl.store(SCALE + tl.cast(across, tl.int64) * scale_stride + row, inverse, mask=row < r)
        if WRITES_COLUMNS:
            power = power_bits(tl.max(bits, axis=0), largest)
            codes = encoded(x * power.to(tl.float32, bitcast=True)[None, :], largest, FORMAT)
            inverse = (0x7F000000 - power).to(tl.float32, bitcast=True)
            tl.store(TRANSPOSED + column[:, None] * r + row[None, :], tl.trans(codes), mask=tl.trans(inside))
            tl.store(TRANSPOSED_SCALE + tl.cast(down, tl.int64) * transposed_scale_stride + column, inverse, mask=column < c)  # fmt: skip


@jit
def power_bits(bits, largest):
    """Return the bits of the power of two that scales a block whose largest absolute value has these bits."""
    is_usable = (bits > 0) & (bits < 0x7F800000)
    amax = tl.where(is_usable, bits, 0x3F800000).to(tl.float32, bitcast=True)
    scale = tl.minimum(tl.div_rn(largest, amax), 8.507059173023462e37)  # 2^126
    return tl.where(is_usable, scale.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)


@jit
def encoded(scaled, largest, FORMAT: tl.constexpr):
    """Return the FP8 codes of scaled values as bytes; 0x7F, NaN in both formats, for those that are not finite."""
    clamped = tl.minimum(tl.maximum(scaled, -largest), largest)
    is_finite = (scaled.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    return tl.where(is_finite, clamped.to(FORMAT).to(tl.uint8, bitcast=True), 0x7F).to(tl.uint8)
