"""The GEMM of a linear layer. A single row, as in text generation, has a kernel that reads at the rate of the memory."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.fused import matrix_vector as fused
from megatrain.kernels.fused.launching import is_fused


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias, as one GEMM: x [..., i], weight [o, i], bias [o] -> [..., o]."""
    if x.numel() == x.shape[-1] and x.element_size() == 2 and is_fused(x):
        return fused.matrix_vector(x, weight, bias)
    if bias is None:
        return torch.matmul(x, weight.t())
    return torch.addmm(bias, x.flatten(0, -2), weight.t()).view(*x.shape[:-1], len(weight))
