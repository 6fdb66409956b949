"""Gradients of a linear layer's weight and bias, accumulated in buffers that may have a higher precision than their factors.

On CUDA the GEMM itself accumulates into the fp32 buffer, at the speed of a plain one, and sums the rows for the bias.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.cublaslt import accumulate_with_sums
from megatrain.kernels.fused.launching import is_fused
from megatrain.kernels.sums import add_column_sums


def accumulate_weight_gradient(
    grad: Tensor | None, dy: Tensor, x: Tensor, bias_grad: Tensor | None = None
) -> None:
    """grad += dy^T x, bias_grad += dy.sum(0). What is frozen, or does not exist, has no gradient: None.

    Args:
        grad: [out, in], in the dtype of gradients.
        dy: gradient of the output, [t, out].
        x: input, [t, in], in the dtype of `dy`.
        bias_grad: [out], in the dtype of gradients.
    """
    if bias_grad is not None:
        is_mixed = dy.element_size() == 2 and len(dy) > 0 and is_fused(dy)
        if grad is not None and grad.dtype is torch.float32 and is_mixed:
            bias_grad.add_(accumulate_with_sums(grad, dy.contiguous(), x.contiguous()))
            return
        add_column_sums(bias_grad, dy)
    if grad is None:
        return
    if grad.dtype == dy.dtype:
        grad.addmm_(dy.t(), x)
    elif grad.is_cuda:
        torch.addmm(grad, dy.t(), x, out_dtype=grad.dtype, out=grad)
    else:
        accumulate_weight_gradient_reference(grad, dy, x)


def accumulate_weight_gradient_reference(grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """Compute grad += dy^T x after casting dy and x to the buffer's dtype."""
    grad.addmm_(dy.to(grad.dtype).t(), x.to(grad.dtype))
