"""GEMMs of FP8 matrices: torch's kernel on GPUs with FP8 tensor cores, an emulation elsewhere.

The emulation multiplies the same codes, so that results differ by the rounding of sums alone; in fp64 it sums in fp64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.kernels.cublaslt import accumulate
from megatrain.kernels.dtypes import accumulation_dtype


class Operand(NamedTuple):
    """A matrix in FP8, contiguous along the inner dimension of a GEMM."""

    codes: Tensor
    """[n, k]."""
    scale: Tensor
    """Inverse of their scale, and the scale, fp32 [2] at an address that is a multiple of 16: cuBLAS reads the inverse there."""


def gemm(
    a: Operand,
    b: Operand,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    *,
    fast: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Return a b^T + bias: [m, k], [n, k] -> [m, n].

    Args:
        dtype: dtype of the result, and of the bias.
        fast: the tensor cores keep fewer bits of partial sums: twice as fast, for forward passes.
        out: memory of the result, [m, n].
    """
    if not a.codes.is_cuda or dtype is torch.float64:
        wide = accumulation_dtype(dtype)
        result = (a.codes.to(wide) @ b.codes.to(wide).t()) * (a.scale[0] * b.scale[0])
        result = (result if bias is None else result + bias).to(dtype)
        return result if out is None else out.copy_(result)
    is_fused = bias is not None and dtype is not torch.float32  # torch adds biases to results in 16 bits only
    result = torch._scaled_mm(  # noqa: SLF001 (torch 2.11 has no public name)
        a.codes,
        b.codes.t(),
        scale_a=a.scale[0],
        scale_b=b.scale[0],
        bias=bias if is_fused else None,
        out_dtype=dtype,
        use_fast_accum=fast,
        out=out,
    )
    return result if bias is None or is_fused else result + bias


def accumulate_gemm(total: Tensor, a: Operand, b: Operand, *, is_zero: bool = False) -> None:
    """Compute total += a b^T, in the dtype of `total`: fp32 or fp64. On GPUs the GEMM itself adds.

    Args:
        is_zero: `total` is zero or undefined, and is overwritten.
    """
    if total.is_cuda and total.dtype is torch.float32:
        accumulate(total, a.codes, b.codes, (a.scale[0], b.scale[0]), beta=0.0 if is_zero else 1.0)
    elif is_zero:
        gemm(a, b, total.dtype, fast=False, out=total)
    else:
        total += gemm(a, b, total.dtype, fast=False)
