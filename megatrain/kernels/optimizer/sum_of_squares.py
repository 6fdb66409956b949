"""Sum of squares, from which norms of a whole model are made.

Norms of one process and of many must agree. torch's norm on a CPU adds one element after the other in the tensor's own
dtype: over a million fp32 elements it is off by some 3e-5, which a run over many ranks would not repeat.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 20


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Over every element of all tensors: a number in fp64 on `device`, with bounded scratch memory.

    Args:
        tensors: there, or in the host's memory.
        device: where the ranks' sums meet.
    """
    here = [tensor for tensor in tensors if tensor.is_cuda]
    away = [tensor for tensor in tensors if not tensor.is_cuda]
    return _on_gpu(here, device) + _on_host(away, device)


def _on_gpu(tensors: list[Tensor], device: torch.device) -> Tensor:
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.nn.utils.get_total_norm(tensors).to(torch.float64).square()


def _on_host(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    return sum_of_squares_reference(tensors).to(device)


def sum_of_squares_reference(tensors: Sequence[Tensor]) -> Tensor:
    """The same by torch's sum, which adds in pairs."""
    chunks = [chunk for tensor in tensors for chunk in tensor.flatten().split(_CHUNK_ELEMENTS)]
    return torch.stack([chunk.square().sum().to(torch.float64) for chunk in chunks]).sum()
