"""Normally distributed numbers that depend on a key and a place alone.

    (key, flat index) -> Philox4x32-10 -> 32 random bits -> inverse normal distribution

Every rank fills just its box of a tensor and gets what any other layout gets. Only integer operations and the
IEEE operations that are rounded exactly (+, -, *, / and powers of two) are used, each as an operation of its
own, so that the numbers are the same to the last bit on every device, in every chunking, and from the fused kernel.

Sources: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011) for Philox; Wichura, "Algorithm
AS 241" (1988), routine PPND7, for the inverse of the normal distribution (relative error about 1e-7).
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from megatrain.kernels.fused import random as fused
from megatrain.kernels.fused.launching import is_fused

WORDS = 4
"""Random words that one counter gives: the numbers 4 c to 4 c + 3 of a stream come from counter c."""

_CHUNK_COUNTERS = 1 << 17
_LOW = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85


def stream_key(seed: int, name: str) -> int:
    """64-bit key of the stream of one named tensor."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def fill_normal(
    out: Tensor, *, key: int, first: int, row_stride: int, mean: float = 0.0, std: float = 1.0
) -> None:
    """Fill `out` with the numbers of a stream that stand at its elements' places.

    Args:
        out: contiguous [rows, columns], any float dtype and device; rounded from double precision.
        key: of the stream, from `stream_key`.
        first: flat place of out[0, 0] in the whole tensor.
        row_stride: distance between the places of out[r, 0] and out[r + 1, 0].
    """
    if is_fused(out):
        fused.fill_normal(out, key, first, row_stride, mean, std)
    else:
        fill_normal_reference(out, key=key, first=first, row_stride=row_stride, mean=mean, std=std)


def fill_normal_reference(
    out: Tensor, *, key: int, first: int, row_stride: int, mean: float = 0.0, std: float = 1.0
) -> None:
    """The same, with torch's operators."""
    rows, columns = out.shape
    if not rows or not columns:
        return
    columns_a_pass = min(columns, WORDS * _CHUNK_COUNTERS)
    rows_a_pass = max(1, WORDS * _CHUNK_COUNTERS // columns_a_pass)
    for row in range(0, rows, rows_a_pass):
        for column in range(0, columns, columns_a_pass):
            part = out[row : row + rows_a_pass, column : column + columns_a_pass]
            values = _normal_block(
                part.shape[0], part.shape[1], key, first + row * row_stride + column, row_stride, out.device
            )
            if std != 1.0 or mean != 0.0:
                values = values * std + mean
            part.copy_(values.to(torch.float32) if out.dtype != torch.float64 else values)


def _normal_block(
    rows: int, columns: int, key: int, first: int, row_stride: int, device: torch.device
) -> Tensor:
    starts = first + row_stride * torch.arange(rows, dtype=torch.int64, device=device)  # [rows]
    shifts = starts % WORDS
    counters_a_row = (columns + 2 * (WORDS - 1)) // WORDS
    is_aligned = first % WORDS == 0 and (row_stride % WORDS == 0 or rows == 1)
    if is_aligned:
        counters_a_row = (columns + WORDS - 1) // WORDS
    counters = (starts // WORDS)[:, None] + torch.arange(counters_a_row, dtype=torch.int64, device=device)
    bits = torch.stack(philox(counters, key), dim=-1).view(rows, counters_a_row * WORDS)
    if is_aligned:
        bits = bits[:, :columns]
    else:
        bits = bits.gather(1, shifts[:, None] + torch.arange(columns, dtype=torch.int64, device=device))
    return inverse_normal(bits)


def philox(counters: Tensor, key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words in [0, 2^32) for each counter, as int64 like `counters`. Counters are below 2^63."""
    c0, c1 = counters & _LOW, counters >> 32
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = key & _LOW, key >> 32
    for _ in range(_ROUNDS):
        # The products wrap around as signed numbers; their upper half is read as unsigned by the mask.
        product_0, product_1 = c0.mul_(_MULTIPLIER_0), c2.mul_(_MULTIPLIER_1)
        new_0 = (product_1 >> 32).bitwise_and_(_LOW).bitwise_xor_(c1).bitwise_xor_(k0)
        new_2 = (product_0 >> 32).bitwise_and_(_LOW).bitwise_xor_(c3).bitwise_xor_(k1)
        c0, c1, c2, c3 = new_0, product_1.bitwise_and_(_LOW), new_2, product_0.bitwise_and_(_LOW)
        k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
    return c0, c1, c2, c3


def inverse_normal(bits: Tensor) -> Tensor:
    """Quantile of the normal distribution at (bits + 1/2) / 2^32, in double precision, for bits in [0, 2^32).

    The rule's third region, beyond 6.6 standard deviations, is out of reach of 32 bits.
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
    """Natural logarithm of normal numbers: log(m 2^e) = e log 2 + log 3/2 + 2 artanh((m - 3/2) / (m + 3/2))."""
    bits = x.view(torch.int64)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64)  # in [1, 2)
    s = (mantissa - 1.5) / (mantissa + 1.5)  # |s| <= 1/5
    return exponent.to(torch.float64) * _LOG_2 + (_LOG_THREE_HALVES + s * _polynomial(s * s, _ARTANH))


def _sqrt(x: Tensor) -> Tensor:
    """Square root for x in [2.5, 23], where the tails are, by Heron's rule: CUDA's own is not rounded exactly."""
    root = 1.0 + 0.17 * x  # within 15 %
    for _ in range(4):
        root = 0.5 * (root + x / root)
    return root


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Horner's rule, highest coefficient first; product and sum stay two roundings on every device."""
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
