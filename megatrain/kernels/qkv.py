"""Heads of queries, keys, values and gate as one fused tensor, [s, b, heads, d], the layout of the QKV projection."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def concat_heads(parts: Sequence[Tensor]) -> Tensor:
    """Return all heads of `parts` [s, b, n, d] as one tensor: the one that they are views of, or a copy."""
    whole = fused_view(parts)
    return concat(parts, dim=2) if whole is None else whole


def concat(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate tensors of one dtype, in elements of 8 bytes where their sizes and strides allow it.

    torch's GPU kernel for strided parts moves one element per thread: 0.9 TB/s on an H200 in bf16.
    """
    dtype = parts[0].dtype
    if not all(_has_words(part) for part in parts):
        return torch.cat(tuple(parts), dim)
    return torch.cat([part.view(torch.int64) for part in parts], dim).view(dtype)


def copy_heads(target: Tensor, source: Tensor) -> None:
    """Copy heads of the same dtype, one for all where `source` has one; in elements of 8 bytes, as `concat`."""
    if _has_words(target) and _has_words(source):
        target, source = target.view(torch.int64), source.view(torch.int64)
    target.copy_(source)


def _has_words(x: Tensor) -> bool:
    """Return whether `x` is a tensor of 8-byte words too."""
    each = 8 // x.element_size()
    numbers = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return x.stride(-1) == 1 and not any(number % each for number in numbers)


def fused_view(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the contiguous tensor whose heads are exactly `parts`, in this order; None if there is none."""
    s, b, _, d = parts[0].shape
    heads = sum(part.shape[2] for part in parts)
    strides = (b * heads * d, heads * d, d, 1)
    storage, address = parts[0].untyped_storage().data_ptr(), parts[0].data_ptr()
    for part in parts:
        is_within = part.untyped_storage().data_ptr() == storage and part.data_ptr() == address
        if not is_within or any(
            size > 1 and stride != expected
            for size, stride, expected in zip(part.shape, part.stride(), strides, strict=True)
        ):
            return None
        address += part.shape[2] * d * part.element_size()
    return parts[0].as_strided((s, b, heads, d), strides)
