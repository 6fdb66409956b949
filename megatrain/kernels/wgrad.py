"""Weight gradient of a linear layer, accumulated in a buffer that may have a higher precision than its factors.

On CUDA the GEMM itself accumulates into the fp32 buffer, at the speed of a plain one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulate_weight_gradient(grad: Tensor | None, dy: Tensor, x: Tensor) -> None:
    """grad += dy^T x. A frozen weight has no gradient: None.

    Args:
        grad: [out, in], in the dtype of gradients.
        dy: gradient of the output, [t, out].
        x: input, [t, in], in the dtype of `dy`.
    """
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
