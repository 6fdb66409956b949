"""Symmetric scales, rounding to the nearest number of a format, and back.

    scale = largest |x| of those that share it / half of the range        number = round(x / scale)        x ~ number * scale

compressed-tensors does the same (`calculate_qparams`); see `NumberFormat.half_range` for a difference of 0.1 % in scales of integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.config.schema.quantization import BLOCK, NumberFormat


def scales_of(x: Tensor, numbers: NumberFormat, dtype: torch.dtype | None = None) -> Tensor:
    """Return the scales of a matrix [r, c], or of tokens [..., c], rounded to `dtype` if it is given.

    Returns:
        tensor: [1]; channel or token: [..., 1]; group: [..., groups]; block: [blocks of rows, blocks of columns].
    """
    return scales_for(amax_of(x, numbers), numbers, x.dtype, dtype)


def amax_of(x: Tensor, numbers: NumberFormat) -> Tensor:
    """Return the largest absolute values of those that share a scale, in the shape of the scales."""
    x = x.abs()
    if numbers.strategy == "tensor":
        found: Tensor = x.amax().reshape(1)
    elif numbers.strategy == "block":
        rows = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % BLOCK))
        found = rows.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).amax((1, 3))
    else:
        found = x.unflatten(-1, (-1, numbers.group_size or x.shape[-1])).amax(-1)
    return found


def scales_for(
    amax: Tensor, numbers: NumberFormat, work_dtype: torch.dtype, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the scales for these largest absolute values, in `work_dtype`; zeros get the smallest scale."""
    dtype = dtype or work_dtype
    scales = (amax / numbers.half_range).to(dtype)
    return torch.where(scales == 0, torch.finfo(dtype).eps, scales).to(work_dtype)


def spread(scales: Tensor, shape: torch.Size, numbers: NumberFormat) -> Tensor:
    """Return scales as a tensor that broadcasts with `shape`, the shape of the values."""
    if numbers.strategy == "block":
        return scales.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)
    return scales if numbers.group_size is None else scales.repeat_interleave(numbers.group_size, -1)


def round_to(x: Tensor, numbers: NumberFormat) -> Tensor:
    """Return values, already divided by their scale, as numbers of the format, in their own dtype."""
    clamped = x.clamp(numbers.smallest, numbers.largest)
    return clamped.to(torch.float8_e4m3fn).to(x.dtype) if numbers.kind == "float" else clamped.round()


def quantize(x: Tensor, scales: Tensor, numbers: NumberFormat) -> Tensor:
    """Return the nearest numbers of the format, in the dtype of `x`. The scales are those of `scales_of`."""
    return round_to(x / spread(scales, x.shape, numbers), numbers)


def dequantize(values: Tensor, scales: Tensor, numbers: NumberFormat) -> Tensor:
    """Return numbers of the format times their scales."""
    return values * spread(scales, values.shape, numbers)


def round_trip(x: Tensor, scales: Tensor, numbers: NumberFormat) -> Tensor:
    """Return what the quantized values stand for."""
    return dequantize(quantize(x, scales, numbers), scales, numbers)
