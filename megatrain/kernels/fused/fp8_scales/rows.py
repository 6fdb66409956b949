"""`kernels.fp8.rows` in Triton: a program reads one row, once."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.fused.fp8_scales.blocks import encoded, power_bits
from megatrain.kernels.fused.fp8_scales.tensors import FORMATS, magnitude_bits
from megatrain.kernels.fused.launching import jit, launch, power_of_two, tl

_WIDTH_PER_WARP = 1024


def row_amax(x: Tensor) -> Tensor:
    """Implement `kernels.fp8.rows.row_amax`."""
    x = x.contiguous()
    amax = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    k = x.shape[-1]
    launch(_row_amax, (amax.numel(),), x, amax, k, BLOCK=power_of_two(k), num_warps=_warps(k))
    return amax


def cast_rows(x: Tensor, amax: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Implement `kernels.fp8.rows.cast_rows`."""
    x = x.contiguous()
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    k = x.shape[-1]
    launch(
        _cast_row, (scale.numel(),), x, scale if amax is None else amax.contiguous(), codes.view(torch.uint8), scale, k,
        torch.finfo(dtype).max, FORMAT=FORMATS.get(dtype), HAS_AMAX=amax is not None, BLOCK=power_of_two(k), num_warps=_warps(k),
    )  # fmt: skip
    return codes, scale


def decode_rows(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Implement `kernels.fp8.rows.decode_rows` for codes [n, k], whose rows may be parts of longer ones."""
    n, k = codes.shape
    out = torch.empty(n, k, dtype=dtype, device=codes.device)
    launch(
        _decode_row, (n,), codes.view(torch.uint8), scale.contiguous(), out, codes.stride(0), k,
        FORMAT=FORMATS.get(codes.dtype), BLOCK=power_of_two(k), num_warps=_warps(k),
    )  # fmt: skip
    return out


def _warps(k: int) -> int:
    return min(max(power_of_two(k) // _WIDTH_PER_WARP, 1), 16)


@jit
def _row_amax(X, AMAX, k, BLOCK: tl.constexpr):
    row = tl.cast(tl.program_id(0), tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(X + row * k + column, mask=column < k, other=0).to(tl.float32)
    bits = tl.max(magnitude_bits(x), axis=0)
    tl.store(AMAX + row, bits.to(tl.float32, bitcast=True))


@jit
def _cast_row(
    X, AMAX, CODES, SCALE, k, largest, FORMAT: tl.constexpr, HAS_AMAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.cast(tl.program_id(0), tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(X + row * k + column, mask=column < k, other=0).to(tl.float32)
    bits = tl.load(AMAX + row).to(tl.int32, bitcast=True) if HAS_AMAX else tl.max(magnitude_bits(x), axis=0)
    power = power_bits(bits, largest)
    codes = encoded(x * power.to(tl.float32, bitcast=True), largest, FORMAT)
    tl.store(CODES + row * k + column, codes, mask=column < k)
    tl.store(SCALE + row, (0x7F000000 - power).to(tl.float32, bitcast=True))


@jit
def _decode_row(CODES, SCALE, OUT, stride, k, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.cast(tl.program_id(0), tl.int64)
    column = tl.arange(0, BLOCK)
    codes = tl.load(CODES + row * stride + column, mask=column < k, other=0).to(FORMAT, bitcast=True)
    value = codes.to(tl.float32) * tl.load(SCALE + row)
    tl.store(OUT + row * k + column, value.to(OUT.dtype.element_ty), mask=column < k)
