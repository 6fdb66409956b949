"""Random numbers that depend only on a key and a position: normal, uniform, and dropout masks.

    key (seed, name), counter (position) ─┬─ Philox4x32-10 -> 32 random bits ─┬─ inverse normal distribution
                                          │                                   └─ (bits + 1/2) / 2^32
                                          └─ Philox4x32-7 -> 16 random bits ─── kept unless below p

The same numbers result under every layout, in every chunking, in recomputed forward passes, after a restart, and from the
fused kernels: each rank fills just its box of a tensor, or its tokens' rows. Normal numbers use only integer operations and
IEEE operations with exact rounding (+, -, *, / and powers of two), one at a time, so that they agree to the last bit on
every device.

Sources: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011) for Philox; Wichura, "Algorithm
AS 241" (1988), routine PPND7, for the inverse of the normal distribution (relative error about 1e-7).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.fused import random as fused
from megatrain.kernels.fused.launching import is_fused
from megatrain.kernels.fused.random import NUMBERS
from megatrain.kernels.sums import ColumnSums, column_sums_reference

WORDS = 4
"""Random words per counter: numbers 4 c to 4 c + 3 of a stream come from counter c."""

KEY_BLOCK = 64
"""Keys of 8 counters of an attention dropout mask."""

NORMAL_CHUNK_COUNTERS = 1 << 17
ROW_CHUNK_COUNTERS = 1 << 20
"""Counters per chunk of normal numbers, and of rows of uniform numbers or dropout masks; bounds the scratch memory."""

Counters = tuple[Tensor, Tensor, Tensor, Tensor]

_LOW = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85


def stream_key(seed: int, name: str) -> int:
    """Return the 64-bit key of a named stream."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def fill_normal(
    out: Tensor, *, key: int, first: int, row_stride: int, mean: float = 0.0, std: float = 1.0
) -> None:
    """Fill `out` with the normal numbers of a stream at its elements' positions.

    Args:
        out: contiguous [rows, columns], any float dtype and device; rounded from double precision.
        key: from `stream_key`.
        first: flat position of out[0, 0] in the whole tensor.
        row_stride: distance between the positions of out[r, 0] and out[r + 1, 0].
    """
    if is_fused(out):
        fused.fill_normal(out, key, first, row_stride, mean, std)
        return
    rows, columns = out.shape
    if not rows or not columns:
        return
    columns_per_chunk = min(columns, WORDS * NORMAL_CHUNK_COUNTERS)
    rows_per_chunk = max(1, WORDS * NORMAL_CHUNK_COUNTERS // columns_per_chunk)
    for row in range(0, rows, rows_per_chunk):
        for column in range(0, columns, columns_per_chunk):
            part = out[row : row + rows_per_chunk, column : column + columns_per_chunk]
            values = _normal_block(
                part.shape[0], part.shape[1], key, first + row * row_stride + column, row_stride, out.device
            )
            if std != 1.0 or mean != 0.0:
                values = values * std + mean
            part.copy_(values.to(torch.float32) if out.dtype != torch.float64 else values)


def fill_uniform(out: Tensor, rows: Tensor, *, key: int, low: float, high: float) -> None:
    """Fill `out` with uniform numbers between `low` and `high`, rounded to its dtype from double precision.

    Args:
        out: [rows, columns], any float dtype.
        rows: row numbers in the whole run (such as tokens), int64 [rows], in any order.
        key: from `stream_key`.
    """
    columns = out.shape[1]
    counters_per_row = -(-columns // WORDS)
    counter = torch.arange(counters_per_row, dtype=torch.int64, device=rows.device)
    for part in _chunks(len(rows), counters_per_row):
        counters = _counters(rows[part, None] * counters_per_row + counter)
        words = torch.stack(philox(counters, key), dim=-1).flatten(1)[:, :columns]
        out[part] = (words.double() + 0.5) * ((high - low) / 2**32) + low


def keep_mask(rows: Tensor, num_columns: int, *, key: int, p: float) -> Tensor:
    """Return a dropout mask: True where an element is kept.

    The counter is (column // 8, row), with a number of 16 bits for each of 8 columns, after 7 rounds (`attention_keep_mask`).

    Args:
        rows: row numbers in the whole run (a token, or a query of a head), int64 [...], in any order.
        num_columns: elements per row.
        key: from `stream_key`.
        p: dropout probability, rounded to a multiple of 2^-16.
    Returns:
        bool [..., num_columns].
    """
    flat, counters_per_row = rows.flatten(), -(-num_columns // NUMBERS)
    kept = torch.empty(len(flat), counters_per_row, NUMBERS, dtype=torch.bool, device=rows.device)
    for part in _chunks(len(flat), counters_per_row):
        row, column = flat[part, None], torch.arange(counters_per_row, device=rows.device)
        words = philox((column, row & _LOW, row >> 32, torch.zeros_like(row)), key, rounds=7)
        for number in range(NUMBERS):
            kept[part, :, number] = _number(words, number) >= dropout_threshold(p)
    return kept.flatten(1)[:, :num_columns].reshape(*rows.shape, num_columns)


def drop(
    x: Tensor,
    rows: Tensor,
    residual: Tensor | None = None,
    *,
    key: int,
    p: float,
    dx_sums: ColumnSums | None = None,
) -> Tensor:
    """Return x times `dropout_factor` where the mask of `keep_mask` is True, else 0; the backward pass computes the mask again.

    Args:
        x: [..., columns].
        rows: number in the run of each row, int64 [...].
        residual: added to the result, which has its dtype; None: nothing is.
        key: from `stream_key`.
        dx_sums: the backward pass leaves the column sums of the gradient of x there.
    """
    out: Tensor = _Drop.apply(x, rows, residual, key, p, dx_sums)
    return out


def _dropped(x: Tensor, rows: Tensor, key: int, p: float, residual: Tensor | None = None) -> Tensor:
    if is_fused(x):
        return fused.drop(x, rows, key, dropout_threshold(p), residual)
    dropped = (x * dropout_factor(p)).masked_fill_(~keep_mask(rows, x.shape[-1], key=key, p=p), 0)
    return dropped if residual is None else residual + dropped


class _Drop(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: Tensor,
        residual: Tensor | None,
        key: int,
        p: float,
        dx_sums: ColumnSums | None,
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.key, ctx.p, ctx.dtype, ctx.adds, ctx.dx_sums = key, p, x.dtype, residual is not None, dx_sums
        return _dropped(x, rows, key, p, residual)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        dy, sums = grads[0].to(ctx.dtype), ctx.dx_sums
        if sums is not None and is_fused(dy):
            dx, of_columns = fused.drop_with_sums(dy, rows, ctx.key, dropout_threshold(ctx.p))
            sums.parts = (of_columns,)
        else:
            dx = _dropped(dy, rows, ctx.key, ctx.p)
            if sums is not None:
                sums.parts = (column_sums_reference(dx),)
        return dx, None, grads[0] if ctx.adds else None, None, None, None


def dropout_threshold(p: float) -> int:
    """Return p in units of 2^-16: numbers of 16 bits below it drop an element."""
    return min(round(p * 2**16), 2**16 - 1)


def dropout_factor(p: float) -> float:
    """Return the factor of elements that are kept: 1 / (1 - p), for p as rounded."""
    return fused.factor_of_kept(dropout_threshold(p))


def attention_keep_mask(heads: Tensor, queries: Tensor, keys: range, *, key: int, p: float) -> Tensor:
    """Return a dropout mask of attention probabilities: True where one is kept.

    The counter is (key block, query, head), so that no product of sizes can overflow, and a counter has the numbers of 8
    keys: k, k + 8, .., k + 56 of a block of 64, whose scores lie in one thread of a fused kernel
    (`fused/attention_dropout.py`). 7 rounds suffice: Salmon et al. report no failure of Philox4x32-7 in BigCrush.

    Args:
        heads: index in the run of each head: sample * heads of the layer + head, int64 [...].
        queries: positions in the sample, int64 [sq].
        keys: positions in the sample.
        key: from `stream_key`.
        p: dropout probability, rounded to a multiple of 2^-16.
    Returns:
        bool [..., sq, keys].
    """
    first = keys.start // KEY_BLOCK
    blocks = -(-keys.stop // KEY_BLOCK) - first
    column = torch.arange(8 * first, 8 * (first + blocks), device=heads.device)
    heads = heads[..., None, None]
    words = philox((column, queries[:, None], heads & _LOW, heads >> 32), key, rounds=7)
    kept = torch.empty(*words[0].shape[:-1], blocks, NUMBERS, 8, dtype=torch.bool, device=heads.device)
    for number in range(NUMBERS):
        is_kept = _number(words, number) >= dropout_threshold(p)
        kept[..., number, :] = is_kept.unflatten(-1, (blocks, NUMBERS))
    return kept.flatten(-3)[..., keys.start - KEY_BLOCK * first :][..., : len(keys)]


def _number(words: Counters, number: int) -> Tensor:
    """Return one of the eight numbers of 16 bits of counters."""
    return (words[number // 2] >> 16 * (number % 2)) & 0xFFFF


def _chunks(num_rows: int, counters_per_row: int) -> Iterator[slice]:
    size = max(1, ROW_CHUNK_COUNTERS // max(counters_per_row, 1))
    return (slice(first, first + size) for first in range(0, num_rows, size))


def _normal_block(
    rows: int, columns: int, key: int, first: int, row_stride: int, device: torch.device
) -> Tensor:
    starts = first + row_stride * torch.arange(rows, dtype=torch.int64, device=device)  # [rows]
    shifts = starts % WORDS
    counters_per_row = (columns + 2 * (WORDS - 1)) // WORDS
    is_aligned = first % WORDS == 0 and (row_stride % WORDS == 0 or rows == 1)
    if is_aligned:
        counters_per_row = (columns + WORDS - 1) // WORDS
    counters = (starts // WORDS)[:, None] + torch.arange(counters_per_row, dtype=torch.int64, device=device)
    bits = torch.stack(philox(_counters(counters), key), dim=-1).view(rows, counters_per_row * WORDS)
    if is_aligned:
        bits = bits[:, :columns]
    else:
        bits = bits.gather(1, shifts[:, None] + torch.arange(columns, dtype=torch.int64, device=device))
    return inverse_normal(bits)


def philox(counters: Counters, key: int, rounds: int = 10) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four words in [0, 2^32) per counter, int64.

    Args:
        counters: four words in [0, 2^32) that can be broadcast together, int64; overwritten.
    """
    c0, c1, c2, c3 = counters
    k0, k1 = key & _LOW, key >> 32
    for _ in range(rounds):
        # Products wrap around as signed numbers; the mask reads their upper half as unsigned.
        product_0, product_1 = c0.mul_(_MULTIPLIER_0), c2.mul_(_MULTIPLIER_1)
        new_0 = (product_1 >> 32).bitwise_and_(_LOW).bitwise_xor_(k0) ^ c1
        new_2 = (product_0 >> 32).bitwise_and_(_LOW).bitwise_xor_(k1) ^ c3
        c0, c1, c2, c3 = new_0, product_1.bitwise_and_(_LOW), new_2, product_0.bitwise_and_(_LOW)
        k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
    return c0, c1, c2, c3


def _counters(position: Tensor) -> Counters:
    """Return the words of 64-bit counters, int64 below 2^63."""
    return position & _LOW, position >> 32, torch.zeros_like(position), torch.zeros_like(position)


def inverse_normal(bits: Tensor) -> Tensor:
    """Return the quantile of the normal distribution at (bits + 1/2) / 2^32 in double precision, for bits in [0, 2^32).

    32 bits do not reach the third region of AS 241, beyond 6.6 standard deviations.
    """
    q = bits.to(torch.float64).sub_(2.0**31 - 0.5).mul_(2.0**-32)
    r = (q * q).neg_().add_(0.180625)
    values = _polynomial(r, _CENTRE_UPPER).mul_(q).div_(_polynomial(r, _CENTRE_LOWER))
    tail = (q.abs() > 0.425).nonzero(as_tuple=True)
    q_tail = q[tail]
    r = _sqrt(-_log(0.5 - q_tail.abs())) - 1.6
    quantile = _polynomial(r, _TAIL_UPPER) / _polynomial(r, _TAIL_LOWER)
    values[tail] = torch.where(q_tail < 0, -quantile, quantile)
    return values


def _log(x: Tensor) -> Tensor:
    """Return the natural logarithm of normal (not subnormal) numbers: log(m 2^e) = e log 2 + log 3/2 + 2 artanh((m - 3/2) / (m + 3/2))."""
    bits = x.view(torch.int64)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64)  # in [1, 2)
    s = (mantissa - 1.5) / (mantissa + 1.5)  # |s| <= 1/5
    return exponent.to(torch.float64) * _LOG_2 + (_LOG_THREE_HALVES + s * _polynomial(s * s, _ARTANH))


def _sqrt(x: Tensor) -> Tensor:
    """Return the square root for x in [2.5, 23], the range of the tails, by Heron's rule: CUDA's own is not rounded exactly."""
    root = 1.0 + 0.17 * x  # within 15 %
    for _ in range(4):
        root = 0.5 * (root + x / root)
    return root


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Evaluate a polynomial by Horner's rule, highest coefficient first; product and sum are rounded separately on every device."""
    value = (x * coefficients[0]).add_(coefficients[1])
    for coefficient in coefficients[2:]:
        value.mul_(x).add_(coefficient)
    return value


_LOG_2 = 0.6931471805599453
_LOG_THREE_HALVES = 0.4054651081081644
_ARTANH = tuple(2.0 / (2 * k + 1) for k in range(7, -1, -1))
_CENTRE_UPPER = (5.9109374720e01, 1.5929113202e02, 5.0434271938e01, 3.3871327179e00)
_CENTRE_LOWER = (6.7187563600e01, 7.8757757664e01, 1.7895169469e01, 1.0)
_TAIL_UPPER = (1.7023821103e-01, 1.3067284816e00, 2.7568153900e00, 1.4234372777e00)
_TAIL_LOWER = (1.2021132975e-01, 7.3700164250e-01, 1.0)
