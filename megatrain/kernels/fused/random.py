"""`kernels.random` in one pass, with the same bits: no product and sum are fused into one operation."""

from __future__ import annotations

import functools
import struct

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import cdiv, jit, launch, power_of_two, tl

_BLOCK = 512
_COUNTERS = 256
"""Elements of a program: normal numbers, and counters of dropout."""
_SUMMING_PROGRAMS = 132 * 7
"""Programs that sum columns: enough to saturate an H200's memory bandwidth, and one launch adds what they leave (`sums`)."""
NUMBERS = 8
"""Numbers of 16 bits of a counter."""


def fill_normal(out: Tensor, key: int, first: int, row_stride: int, mean: float, std: float) -> None:
    """Implement `kernels.random.fill_normal`."""
    assert out.is_contiguous()
    size = out.numel()
    launch(
        _normal, (cdiv(size, _BLOCK),),
        out, size, out.shape[1], *halves("<Q", first), row_stride, *halves("<Q", key), *halves("<d", mean), *halves("<d", std),
        BLOCK=_BLOCK, enable_fp_fusion=False,
    )  # fmt: skip


def drop(x: Tensor, rows: Tensor, key: int, threshold: int, residual: Tensor | None = None) -> Tensor:
    """Implement `kernels.random.drop`; numbers below `threshold` drop elements."""
    out = torch.empty_like(x if residual is None else residual, memory_format=torch.contiguous_format)
    _launch_drop(out, x, rows, key, threshold, residual, None)
    return out


def drop_with_sums(x: Tensor, rows: Tensor, key: int, threshold: int) -> tuple[Tensor, Tensor]:
    """Return the same and rows whose sum is that of its columns, fp32 [rows, columns]."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    counters, tile_rows = _tile(x.shape[-1])
    programs = min(
        cdiv(rows.numel(), tile_rows), cdiv(_SUMMING_PROGRAMS, cdiv(x.shape[-1], NUMBERS * counters))
    )
    sums = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
    _launch_drop(out, x, rows, key, threshold, None, sums)
    return out, sums


def factor_of_kept(threshold: int) -> float:
    """Return the factor of elements whose numbers are not below `threshold`."""
    return 2**16 / (2**16 - threshold)


def _tile(columns: int) -> tuple[int, int]:
    """Return the counters of a row, and the rows, of a program's tile."""
    counters = min(_COUNTERS, power_of_two(cdiv(columns, NUMBERS)))
    return counters, _COUNTERS // counters


def _launch_drop(
    out: Tensor,
    x: Tensor,
    rows: Tensor,
    key: int,
    threshold: int,
    residual: Tensor | None,
    sums: Tensor | None,
) -> None:
    """Run a program for each tile of rows, or as many as there are rows of sums."""
    x, rows, columns = x.contiguous(), rows.contiguous(), x.shape[-1]
    counters, tile_rows = _tile(columns)
    launch(
        _drop, (cdiv(rows.numel(), tile_rows) if sums is None else len(sums), cdiv(columns, NUMBERS * counters)),
        x, x if residual is None else residual.contiguous(), out, x if sums is None else sums, rows, rows.numel(), columns,
        *halves("<Q", key), threshold, factor_of_kept(threshold),
        ADDS=residual is not None, HAS_SUMS=sums is not None, ROWS=tile_rows, COUNTERS=counters,
    )  # fmt: skip


def halves(kind: str, number: float) -> tuple[int, ...]:
    """Return the lower and the upper 32 bits of a number packed to 64 bits, as signed integers.

    Triton recompiles a kernel for wider integers, and passes double-precision arguments as fp32.
    """
    return struct.unpack("<ii", struct.pack(kind, number))


@jit
def _long(low, high):
    """Return the int64 of these two halves."""
    return (tl.cast(high, tl.int64) << 32) | (tl.cast(low, tl.int64) & 0xFFFFFFFF)


@jit
def philox(c0, c1, c2, c3, k0, k1, ROUNDS: tl.constexpr):
    """Return the four words of Philox4x32, uint32; operands are broadcast in the round that first combines them."""
    for _ in tl.static_range(ROUNDS):
        product_0, product_1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (product_1 >> 32).to(tl.uint32) ^ c1 ^ k0, (product_0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = product_1.to(tl.uint32), product_0.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@jit
def _word(counter, word, key_low, key_high):
    """Return one of the four words of Philox4x32-10 at these counters."""
    zero = tl.zeros_like(counter).to(tl.uint32)
    k0, k1 = tl.cast(key_low, tl.uint32), tl.cast(key_high, tl.uint32)
    c0, c1, c2, c3 = philox(counter.to(tl.uint32), (counter >> 32).to(tl.uint32), zero, zero, k0, k1, 10)
    return tl.where(word == 0, c0, tl.where(word == 1, c1, tl.where(word == 2, c2, c3)))


@jit
def _double(x, number: tl.constexpr):
    return tl.full(x.shape, number, tl.float64)


@jit
def _log(x):
    """Implement `kernels.random._log`."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) - 1023).to(tl.float64)
    mantissa = ((bits & ((1 << 52) - 1)) | (1023 << 52)).to(tl.float64, bitcast=True)
    s = (mantissa - _double(x, 1.5)) / (mantissa + _double(x, 1.5))
    square = s * s
    value = square * _double(x, 2.0 / 15) + _double(x, 2.0 / 13)
    value = value * square + _double(x, 2.0 / 11)
    value = value * square + _double(x, 2.0 / 9)
    value = value * square + _double(x, 2.0 / 7)
    value = value * square + _double(x, 2.0 / 5)
    value = value * square + _double(x, 2.0 / 3)
    value = value * square + _double(x, 2.0)
    return exponent * _double(x, 0.6931471805599453) + (_double(x, 0.4054651081081644) + s * value)


@jit
def _quantile(bits):
    """Implement `kernels.random.inverse_normal`, computing both regions for every element."""
    x = bits.to(tl.float64)
    q = (x - _double(x, 2147483647.5)) * _double(x, 2.3283064365386963e-10)  # 2^31 - 1/2, 2^-32
    r = _double(x, 0.180625) - q * q
    upper = r * _double(x, 5.9109374720e01) + _double(x, 1.5929113202e02)
    upper = upper * r + _double(x, 5.0434271938e01)
    upper = upper * r + _double(x, 3.3871327179e00)
    lower = r * _double(x, 6.7187563600e01) + _double(x, 7.8757757664e01)
    lower = lower * r + _double(x, 1.7895169469e01)
    lower = lower * r + _double(x, 1.0)
    centre = upper * q / lower

    size = -_log(_double(x, 0.5) - tl.abs(q))
    root = size * _double(x, 0.17) + _double(x, 1.0)
    for _ in tl.static_range(4):
        root = (root + size / root) * _double(x, 0.5)
    r = root - _double(x, 1.6)
    upper = r * _double(x, 1.7023821103e-01) + _double(x, 1.3067284816e00)
    upper = upper * r + _double(x, 2.7568153900e00)
    upper = upper * r + _double(x, 1.4234372777e00)
    lower = r * _double(x, 1.2021132975e-01) + _double(x, 7.3700164250e-01)
    lower = lower * r + _double(x, 1.0)
    tail = upper / lower
    tail = tl.where(q < 0, -tail, tail)
    return tl.where(tl.abs(q) > _double(x, 0.425), tail, centre)


@functools.partial(
    jit,
    any_value=(
        *("size", "columns", "first_low", "first_high", "row_stride", "key_low", "key_high"),
        *("mean_low", "mean_high", "std_low", "std_high"),
    ),
)
def _normal(
    OUT, size, columns, first_low, first_high, row_stride, key_low, key_high, mean_low, mean_high, std_low, std_high,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    position = _long(first_low, first_high) + (index // columns) * row_stride + index % columns
    values = _quantile(_word(position // 4, position % 4, key_low, key_high))
    mean = _long(mean_low, mean_high).to(tl.float64, bitcast=True)
    std = _long(std_low, std_high).to(tl.float64, bitcast=True)
    values = values * std + mean
    tl.store(OUT + index, values.to(tl.float32).to(OUT.dtype.element_ty), mask=index < size)


@functools.partial(jit, any_value=("num_rows", "key_low", "key_high", "threshold"))
def _drop(
    X, ADDED, OUT, SUMS, ROW, num_rows, columns, key_low, key_high, threshold, factor,
    ADDS: tl.constexpr, HAS_SUMS: tl.constexpr, ROWS: tl.constexpr, COUNTERS: tl.constexpr,
):  # fmt: skip
    counter = tl.program_id(1) * COUNTERS + tl.arange(0, COUNTERS)[None, :]
    column = tl.program_id(1) * COUNTERS * 8 + tl.arange(0, COUNTERS * 8)
    is_column = column < columns
    total = tl.zeros([ROWS, COUNTERS * 8], dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        index = row[:, None] * columns + column[None, :]
        inside = (row < num_rows)[:, None] & is_column[None, :]
        x = tl.load(X + index, mask=inside, other=0).to(tl.float32)
        number = tl.load(ROW + row, mask=row < num_rows, other=0)[:, None]
        bits = _bits_of_columns(counter, number, key_low, key_high)
        out = tl.where(bits >= (tl.cast(threshold, tl.uint32) << 16), x * factor, 0)
        if HAS_SUMS:
            total += out
        if ADDS:
            added = tl.load(ADDED + index, mask=inside, other=0).to(tl.float32)
            out = added + out.to(X.dtype.element_ty).to(tl.float32)
        tl.store(OUT + index, out.to(OUT.dtype.element_ty), mask=inside)
    if HAS_SUMS:
        tl.store(SUMS + tl.program_id(0) * columns + column, tl.sum(total, axis=0), mask=is_column)


@jit
def _bits_of_columns(counter, row, key_low, key_high):
    """Return 32 bits for each column, whose upper 16 are its number: those of eight columns lie in one counter."""
    k0, k1 = tl.cast(key_low, tl.uint32), tl.cast(key_high, tl.uint32)
    of_row = row.to(tl.uint32), (row >> 32).to(tl.uint32)
    w0, w1, w2, w3 = philox(counter.to(tl.uint32), of_row[0], of_row[1], tl.zeros_like(of_row[1]), k0, k1, 7)
    # Word j has the numbers 2 j, its lower half, and 2 j + 1.
    even = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return tl.interleave(even << 16, even)
