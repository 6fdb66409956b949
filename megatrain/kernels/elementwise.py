"""Element-wise operations of a transformer layer, forward and backward, in any dtype on any device.

These are the references that fused kernels are measured against. Arithmetic runs in `wide(dtype)`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Dtype for sums over many elements: fp32, or the operand's own where that is wider."""
    return torch.promote_types(dtype, torch.float32)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels by the angle of its position (rotary embedding).

    Channel i pairs with channel i + d/2; weights trained with neighbouring pairs must be permuted first. The
    backward pass is the same turn with -sin.

    Args:
        x: queries or keys, [s, b, n, d].
        cos, sin: wide tables of the positions, [s, 1, 1, d/2].
    Returns:
        [s, b, n, d] in the dtype of `x`.

    Source: RoFormer, arXiv:2104.09864, section 3.4.
    """
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
