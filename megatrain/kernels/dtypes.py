"""The dtype of element-wise arithmetic and sums."""

from __future__ import annotations

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums over many elements: fp32, or the operand's own if it has a higher precision."""
    return torch.promote_types(dtype, torch.float32)
