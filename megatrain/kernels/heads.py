"""Heads of queries, keys and values as one tensor, [s, b, n + 2 g, d], as they come out of a linear layer and go back to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def joined_heads(parts: Sequence[Tensor]) -> Tensor:
    """All heads of parts [s, b, n, d]: the tensor that they are parts of, or a new one."""
    whole = whole_of(parts)
    return torch.cat(tuple(parts), dim=2) if whole is None else whole


def whole_of(parts: Sequence[Tensor]) -> Tensor | None:
    """The contiguous tensor that has these parts and no others as its heads, in this order; None if there is none."""
    s, b, _, d = parts[0].shape
    heads = sum(part.shape[2] for part in parts)
    strides = (b * heads * d, heads * d, d, 1)
    storage, address = parts[0].untyped_storage().data_ptr(), parts[0].data_ptr()
    for part in parts:
        is_within = part.untyped_storage().data_ptr() == storage and part.data_ptr() == address
        if not is_within or any(
            size > 1 and stride != wanted
            for size, stride, wanted in zip(part.shape, part.stride(), strides, strict=True)
        ):
            return None
        address += part.shape[2] * d * part.element_size()
    return parts[0].as_strided((s, b, heads, d), strides)
