"""Linear layer of a router, which computes in fp32 or fp64 while hidden states and weights may be in 16 bits.

On GPUs the tensor cores compute fp32 products from bf16 factors, whose products are exact in fp32; sums are in fp32 either
way. The gradient of the logits is in fp32, so that it is split into three bf16 numbers, whose sum has all of its 24 bits:

    dx = [high, middle, low] [W, W, W]^T            dW = high^T x + middle^T x + low^T x

A GEMM with K = 384 replaces one with K = 128 in fp32, which tensor cores do not compute.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatrain.kernels.fused.launching import is_fused
from megatrain.kernels.linear import accumulate_weight_gradient

_PARTS = 3


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x W^T, computed and returned in `dtype`: x [t, h], weight [E, h] -> [t, E]."""
    if _uses_tensor_cores(x, weight, dtype):
        return torch.mm(x, weight.t(), out_dtype=dtype)
    return x.to(dtype) @ weight.to(dtype).t()


def linear_backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Callable[[Tensor], None]]:
    """Return the gradient of x, computed in the dtype of `dy`: [t, E] -> [t, h] in the dtype of x, and of W.

    Returns:
        dx, and a function that adds dy^T x to its argument [E, h], in the dtype of `dy` or, if x has that too, of the argument.
    """
    if _uses_tensor_cores(x, weight, dy.dtype):
        parts = split_in_bf16(dy)
        return parts @ weight.repeat(_PARTS, 1), partial(_accumulate_parts, parts=parts, x=x, dtype=dy.dtype)
    return (dy @ weight.to(dy.dtype)).to(x.dtype), partial(_accumulate, dy=dy, x=x)


def _accumulate_parts(grad: Tensor, *, parts: Tensor, x: Tensor, dtype: torch.dtype) -> None:
    products = torch.mm(parts.t(), x, out_dtype=dtype)
    grad.add_(products.view(_PARTS, *grad.shape).sum(0))


def _accumulate(grad: Tensor, *, dy: Tensor, x: Tensor) -> None:
    factors = dy.dtype if x.dtype == dy.dtype else grad.dtype
    accumulate_weight_gradient(grad, dy.to(factors), x.to(factors))


def split_in_bf16(x: Tensor) -> Tensor:
    """Return three bf16 numbers for each fp32 number, whose sum it is: [t, n] -> [t, 3 n], the largest ones first."""
    parts = torch.empty(len(x), _PARTS, x.shape[1], dtype=torch.bfloat16, device=x.device)
    high, middle, low = parts.unbind(1)
    rest = x - high.copy_(x)
    middle.copy_(rest)
    low.copy_(rest.sub_(middle))
    return parts.flatten(1)


def _uses_tensor_cores(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    return is_fused(x) and x.dtype == weight.dtype == torch.bfloat16 and dtype == torch.float32
