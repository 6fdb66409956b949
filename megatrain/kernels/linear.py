"""The GEMM of a linear layer, and its weight gradient, accumulated in a buffer that may have a higher precision than its factors.

A single row, as in text generation, has a kernel that reads at the rate of the memory. On CUDA the GEMM of the weight gradient itself
accumulates into the fp32 buffer, at the speed of a plain one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.kernels.fused import matrix_vector as fused
from megatrain.kernels.fused.launching import is_fused


@dataclass
class FirstWrite:
    """State of a weight's gradient, for a layer whose GEMM may overwrite it instead of adding to it.

    A GEMM that overwrites neither reads the memory nor needs zeros there.
    """

    is_due: bool = True
    """Nothing was added to the gradient."""

    def take(self) -> bool:
        """Return True if the contribution that follows is the first one.

        Replayed CUDA graphs do as they did when they were recorded, and change no state of the host: a step has graphs for all
        its micro-batches or for none.
        """
        is_due, self.is_due = self.is_due, False
        return is_due


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias, as one GEMM: x [..., i], weight [o, i], bias [o] -> [..., o]."""
    if x.numel() == x.shape[-1] and x.element_size() == 2 and is_fused(x):
        return fused.matrix_vector(x, weight, bias)
    if bias is None:
        return torch.matmul(x, weight.t())
    return torch.addmm(bias, x.flatten(0, -2), weight.t()).view(*x.shape[:-1], len(weight))


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
        grad.addmm_(dy.to(grad.dtype).t(), x.to(grad.dtype))
