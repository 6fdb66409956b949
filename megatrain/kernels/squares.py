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
    """Over every element of all tensors, which lie on `device`: a number in fp64, with bounded scratch memory."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    if device.type == "cuda":
        return torch.nn.utils.get_total_norm(list(tensors)).to(torch.float64).square()
    return sum_of_squares_reference(tensors)


def sum_of_squares_reference(tensors: Sequence[Tensor]) -> Tensor:
    """The same by torch's sum, which adds in pairs."""
    chunks = [chunk for tensor in tensors for chunk in tensor.flatten().split(_CHUNK_ELEMENTS)]
    return torch.stack([chunk.square().sum().to(torch.float64) for chunk in chunks]).sum()
