"""Casts to FP8 with one scale per tensor.

    scale = largest number of the format / largest |x| / 2^margin      code = round(clamp(x * scale))      x ~ code / scale

A GEMM of FP8 matrices reads both along its inner dimension. A tensor is an operand of two GEMMs with different
inner dimensions, so that one pass over it writes its codes row by row, and transposed.

NaN and infinity become NaN, so that they reach the loss. Source: Micikevicius et al., arXiv:2209.05433.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fused.fp8_scales import tensors as fused
from megatrain.kernels.fused.launching import is_fused


class Codes(NamedTuple):
    """Codes of a matrix: both orders, or one of them."""

    rows: Tensor | None
    """[r, c] in an FP8 format."""
    columns: Tensor | None
    """Transposed, [c, r]."""


@dataclass
class Amax:
    """Largest absolute value of a tensor, left by the kernel that wrote it to the layer that casts it.

    A kernel that has the values in its registers saves a pass over memory.
    """

    value: Tensor | None = None
    """fp32 []; None: it left none."""

    def take(self) -> Tensor | None:
        """Return the value once."""
        value, self.value = self.value, None
        return value


def current_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale for the largest absolute value of `x`: see `scale_of`."""
    return fused.current_scale(x, dtype) if is_fused(x) else scale_of(amax(x), torch.finfo(dtype).max)


def scale_of_one(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale of one tensor, whose largest absolute value is `amax`, fp32 []: see `scale_of`."""
    return fused.scale_of_one(amax, dtype) if is_fused(amax) else scale_of(amax, torch.finfo(dtype).max)


def amax(x: Tensor) -> Tensor:
    """Return the largest absolute value, fp32 []; NaN if there is one."""
    return fused.amax(x) if is_fused(x) else x.abs().amax().float()


def scale_of(amax: Tensor, largest: float | Tensor, margin: int = 0) -> Tensor:
    """Return the scale of tensors whose largest absolute values are `amax`; 1 for 0.

    Args:
        amax: fp32 [...].
        largest: largest number of the FP8 format, or of each tensor's.
        margin: powers of two left free above the largest value.
    Returns:
        fp32 [..., 2]: the inverse of the scale, which a GEMM applies, and the scale, the factor before the cast.
    """
    numbers = largest if isinstance(largest, Tensor) else torch.full_like(amax, largest)
    scale = numbers / amax / 2.0**margin
    scale = torch.where(scale.isinf(), torch.finfo(torch.float32).max, scale)
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.stack((scale.reciprocal(), scale), dim=-1)


def quantize(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    rows: bool = True,
    columns: bool = True,
    seen: Tensor | None = None,
) -> Codes:
    """Cast a matrix to FP8.

    Args:
        x: [r, c].
        scale: fp32 [2], of `scale_of`.
        dtype: FP8 format.
        rows, columns: which codes to write.
        seen: fp32 []: becomes the larger one of itself and the largest absolute value of `x`.
    """
    if is_fused(x):
        return Codes(*fused.quantize(x, scale, dtype, rows, columns, seen))
    if seen is not None:
        seen.copy_(torch.maximum(seen, amax(x)))
    codes = encode(x.to(accumulation_dtype(x.dtype)) * scale[1], dtype)
    return Codes(codes if rows else None, transposed(codes) if columns else None)


def encode(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the codes of scaled values with torch operators; values that are not finite become NaN."""
    largest = torch.finfo(dtype).max
    return scaled.clamp(-largest, largest).masked_fill(~scaled.isfinite(), float("nan")).to(dtype)


def transposed(codes: Tensor) -> Tensor:
    """Return a transposed copy: [r, c] -> [c, r]."""
    if is_fused(codes):
        return fused.transposed(codes)
    return codes.view(torch.uint8).t().contiguous().view(codes.dtype)
