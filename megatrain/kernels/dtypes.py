"""What element-wise arithmetic and sums run in."""

from __future__ import annotations

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype for sums over many elements: fp32, or the operand's own where that is wider."""
    return torch.promote_types(dtype, torch.float32)
