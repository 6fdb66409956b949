"""`kernels.fp8.quantize` in Triton: the largest absolute value in one read, and a cast that writes both orders in one read.

Absolute values are compared as integers: the bits of fp32 numbers without sign have their order, and NaN is the largest.
NaN has the bits 0x7F in both FP8 formats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, tl

_BLOCK = 4096
_PROGRAMS = 132 * 8
"""Number of programs that saturates an H200's memory bandwidth."""
_PROGRAMS_BLOCK = 2048
"""Power of two that is not less."""
FORMATS = {} if tl is None else {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
_ROWS, _COLUMNS, _WARPS = 32, 128, 4
"""Tile of the cast: 256 contiguous bytes of bf16 are read, 128 and 32 written. Chosen by scripts/benchmarks/fp8.py."""


def current_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Implement `kernels.fp8.quantize.current_scale`."""
    return _scale_of_bits(_largest_bits(x), dtype)


def scale_of_one(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Implement `kernels.fp8.quantize.scale_of_one`."""
    return _scale_of_bits(amax.view(torch.int32), dtype)


def amax(x: Tensor) -> Tensor:
    """Implement `kernels.fp8.quantize.amax`."""
    return _largest_bits(x).amax().view(torch.float32)


def _scale_of_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale for the largest of the values with these bits."""
    scale = torch.empty(2, dtype=torch.float32, device=bits.device)
    launch(_scale, (1,), bits, scale, bits.numel(), torch.finfo(dtype).max, BLOCK=_PROGRAMS_BLOCK)
    return scale


def _largest_bits(x: Tensor) -> Tensor:
    """Return the bits of the largest absolute values of parts of `x`, int32 [programs]."""
    x = x.contiguous()
    num_programs = min(cdiv(x.numel(), _BLOCK), _PROGRAMS)
    bits = torch.empty(num_programs, dtype=torch.int32, device=x.device)
    launch(_amax, (num_programs,), x, bits, x.numel(), num_programs, BLOCK=_BLOCK)
    return bits


def quantize(
    x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, columns: bool, seen: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Implement `kernels.fp8.quantize.quantize`; fp32 values are read twice for both orders.

    One kernel that casts fp32 values and stores both would be wrong: ptxas 12.8 packs four codes into a register and
    leaves that of two undefined, which the transposed order is stored from. Values of 16 bits are cast for each order.
    """
    if rows and columns and x.dtype is torch.float32:
        codes, _ = quantize(x, scale, dtype, True, False, seen)
        _, transposed = quantize(x, scale, dtype, False, True, None)
        return codes, transposed
    x = x.contiguous()
    r, c = x.shape
    codes = torch.empty(r, c, dtype=dtype, device=x.device) if rows else None
    transposed = torch.empty(c, r, dtype=dtype, device=x.device) if columns else None
    any_codes = codes if codes is not None else transposed
    assert any_codes is not None, "nothing to write"
    launch(
        _cast, (cdiv(r, _ROWS), cdiv(c, _COLUMNS)), x, scale,
        (any_codes if codes is None else codes).view(torch.uint8),
        (any_codes if transposed is None else transposed).view(torch.uint8),
        scale if seen is None else seen.view(torch.int32), r, c,
        FORMAT=FORMATS.get(dtype), WRITES_ROWS=rows, WRITES_COLUMNS=columns, SEES=seen is not None,
        IS_EVEN=r % _ROWS == 0 and c % _COLUMNS == 0, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=_WARPS,
    )  # fmt: skip
    return codes, transposed


def transposed(codes: Tensor) -> Tensor:
    """Implement `kernels.fp8.quantize.transposed`."""
    r, c = codes.shape
    out = torch.empty(c, r, dtype=codes.dtype, device=codes.device)
    launch(
        _transpose, (cdiv(r, _ROWS), cdiv(c, _COLUMNS)),
        codes.contiguous().view(torch.uint8), out.view(torch.uint8), r, c, ROWS=_ROWS, COLUMNS=_COLUMNS,
        num_warps=_WARPS,
    )  # fmt: skip
    return out


@jit
def _amax(X, BITS, size, num_programs, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    largest = tl.zeros((BLOCK,), dtype=tl.int32)
    for block in range(program, tl.cdiv(size, BLOCK), num_programs):
        place = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, magnitude_bits(tl.load(X + place, mask=place < size, other=0)))
    tl.store(BITS + program, tl.max(largest, axis=0))


@jit
def _scale(BITS, SCALE, size, largest, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    bits = tl.max(tl.load(BITS + place, mask=place < size, other=0), axis=0)
    amax = bits.to(tl.float32, bitcast=True)
    scale = tl.where(bits == 0, 1.0, tl.div_rn(largest, tl.where(bits == 0, 1.0, amax)))
    scale = tl.where(scale == float("inf"), 3.4028234663852886e38, scale)
    tl.store(SCALE, tl.div_rn(1.0, scale))
    tl.store(SCALE + 1, scale)


@jit
def magnitude_bits(x):
    """Return the bits of absolute values, which have their order as integers."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def see_largest(SEEN, bits):
    """Note the largest of absolute values. A stale value of SEEN only costs an atomic operation that changes nothing."""
    bits = tl.max(bits)
    if bits > tl.load(SEEN, cache_modifier=".cg"):
        tl.atomic_max(SEEN, bits)


@jit
def codes_of(x, scale, FORMAT: tl.constexpr):
    """Return the codes of fp32 values; infinity becomes NaN."""
    scaled = x * scale
    # The GPU's conversion replaces infinity by the largest number; adding 0 * infinity makes it NaN before.
    return tl.fma(scaled, 0.0, scaled).to(FORMAT).to(tl.uint8, bitcast=True)


@jit
def _cast(
    X, SCALE, CODES, TRANSPOSED, SEEN, r, c, WRITES_ROWS: tl.constexpr, WRITES_COLUMNS: tl.constexpr,
    SEES: tl.constexpr, FORMAT: tl.constexpr, IS_EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first_row, first_column = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < r - first_row)[:, None] & (column < c - first_column)[None, :]
    start = tl.cast(first_row, tl.int64) * c + first_column
    place = row[:, None] * c + column[None, :]
    if IS_EVEN:  # wider loads and stores than with a mask
        x = tl.load(X + start + place).to(tl.float32)
    else:
        x = tl.load(X + start + place, mask=inside, other=0).to(tl.float32)
    if SEES:
        see_largest(SEEN, magnitude_bits(x))
    codes = codes_of(x, tl.load(SCALE + 1), FORMAT)
    if WRITES_ROWS:
        if IS_EVEN:
            tl.store(CODES + start + place, codes)
        else:
            tl.store(CODES + start + place, codes, mask=inside)
    if WRITES_COLUMNS:
        start = tl.cast(first_column, tl.int64) * r + first_row
        place = column[:, None] * r + row[None, :]
        if IS_EVEN:
            tl.store(TRANSPOSED + start + place, tl.trans(codes))
        else:
            tl.store(TRANSPOSED + start + place, tl.trans(codes), mask=tl.trans(inside))


@jit
def _transpose(X, OUT, r, c, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.cast(tl.program_id(1), tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < r)[:, None] & (column < c)[None, :]
    x = tl.load(X + row[:, None] * c + column[None, :], mask=inside, other=0)
    tl.store(OUT + column[:, None] * r + row[None, :], tl.trans(x), mask=tl.trans(inside))
