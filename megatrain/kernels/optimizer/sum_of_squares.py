"""Sum of squares, for norms over a whole model.

Norms of one process and of many ranks must agree. torch's norm on a CPU adds elements sequentially in the tensor's
dtype: over a million fp32 elements its error is about 3e-5, and differs between numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 20


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares over all elements of all tensors, fp64 [] on `device`, with bounded scratch memory.

    Args:
        tensors: on `device` or in host memory.
        device: device of the result.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
    on_host = [tensor for tensor in tensors if not tensor.is_cuda]
    if on_gpu:
        total += torch.nn.utils.get_total_norm(on_gpu).to(torch.float64).square()
    if on_host:
        # torch's sum adds pairwise.
        chunks = [chunk for tensor in on_host for chunk in tensor.flatten().split(_CHUNK_ELEMENTS)]
        total += torch.stack([chunk.square().sum().to(torch.float64) for chunk in chunks]).sum().to(device)
    return total
