"""NVFP4, emulated: values of 4 bits (E2M1), a scale in E4M3 per block of 16, and one fp32 scale per tensor.

    s = 6 * 448 / largest |x|      scale of a block = E4M3(s * its largest |x| / 6)      x ~ value * scale / s

A value is 0, 0.5, 1, 1.5, 2, 3, 4 or 6, with a sign. It is stored in E4M3, which has all of these, so that blocks.py
has the GEMMs. Stochastic rounding chooses between the two values around a number such that the mean is that number.
The Hadamard transform mixes 16 elements, so that none of them is much larger than the others; it is orthogonal, so that the
GEMM of two transformed matrices equals the GEMM of the matrices.

Source: Pretraining Large Language Models with NVFP4, arXiv:2509.25149.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fp8.blocks import SCALES_MULTIPLE, Cast
from megatrain.kernels.fp8.gemms import Operand
from megatrain.kernels.fp8.quantize import encode, transposed

BLOCK: Final = 16
"""Values that share a scale; a matrix has whole blocks."""
LARGEST: Final = 6.0
_CODES: Final = torch.float8_e4m3fn
_SIGNS: Final = (1, -1, -1, 1, 1, 1, -1, 1, -1, -1, 1, -1, 1, -1, 1, 1)
"""Signs of the elements before the Hadamard transform: drawn once, the same everywhere."""


def tensor_scale(amax: Tensor) -> Tensor:
    """Return s for the largest absolute value of a tensor, fp32 []; 1 for 0."""
    return torch.where(amax == 0, 1.0, LARGEST * torch.finfo(_CODES).max / amax)


def round_to_e2m1(x: Tensor, random: Tensor | None = None) -> Tensor:
    """Round to the nearest value, ties to even; larger ones to 6.

    Args:
        random: uniform numbers in [0, 1), fp64, in which they stay below 1: stochastic rounding.
    """
    size = x.abs().clamp(max=LARGEST)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0)).to(x.dtype)
    steps = (size / step).round() if random is None else (size / step + random).floor()
    return torch.copysign(steps * step, x)


def cast_row_blocks(x: Tensor, scale: Tensor, random: Tensor | None = None) -> Operand:
    """Cast a matrix [n, k] with a scale per 1 x 16 elements; `scale` is s. See `round_to_e2m1` for `random`."""
    inverse = _inverse_scales(x.unflatten(1, (-1, BLOCK)).abs().amax(dim=2), scale)
    codes = _encode(x, inverse.repeat_interleave(BLOCK, 1), random)
    return Operand(codes, inverse.t().contiguous())


def cast_square_blocks(x: Tensor, scale: Tensor) -> Cast:
    """Cast a matrix with a scale per 16 x 16 elements, the same in both orders."""
    tiles = x.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    inverse = _inverse_scales(tiles.abs().amax(dim=(1, 3)), scale)
    codes = _encode(x, inverse.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1))
    rows, columns = (F.pad(each, (0, -each.shape[1] % SCALES_MULTIPLE)) for each in (inverse, inverse.t()))
    return Cast(Operand(codes, rows), Operand(transposed(codes), columns))


def hadamard(x: Tensor) -> Tensor:
    """Transform each 16 elements of the last dimension, with random signs."""
    matrix = torch.ones(1, 1, dtype=x.dtype, device=x.device)
    while len(matrix) < BLOCK:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    signs = torch.tensor(_SIGNS, dtype=x.dtype, device=x.device)
    mixed: Tensor = (x.unflatten(-1, (-1, BLOCK)) * signs) @ (matrix / math.sqrt(BLOCK))
    return mixed.flatten(-2)


def _inverse_scales(amax: Tensor, scale: Tensor) -> Tensor:
    """Return the factors from values to numbers, fp32, for the largest absolute values of blocks."""
    return encode(amax.float() / LARGEST * scale, _CODES).float() / scale


def _encode(x: Tensor, inverse: Tensor, random: Tensor | None = None) -> Tensor:
    factor = torch.where(inverse == 0, 0.0, inverse.reciprocal())
    return round_to_e2m1(x.to(accumulation_dtype(x.dtype)) * factor, random).to(_CODES)
