"""Parts of a fused projection, and their gradients as one tensor.

heads       queries, keys, values and gate of attention, [s, b, heads, d]: gradients in adjacent memory are joined without a copy
channels    any parts, [s, b, channels]: kernels write their gradients into one tensor
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

Place = Callable[[], Tensor]
"""Returns the memory of the gradient of a part, [s, b, channels], during a backward pass."""


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


def split_channels(x: Tensor, sizes: Sequence[int]) -> tuple[tuple[Tensor, ...], list[Place]]:
    """Split the last axis of x [s, b, channels]; return the parts, and the places of their gradients.

    A kernel may write the gradient of a part into its place; gradients elsewhere are copied there.
    """
    gradient = _Gradient(x, sizes)
    parts: tuple[Tensor, ...] = _Split.apply(x, gradient)
    return parts, [partial(gradient.part, number) for number in range(len(sizes))]


class _Gradient:
    """The gradient of a tensor in parts; it has memory from the first part to the last of a backward pass."""

    def __init__(self, x: Tensor, sizes: Sequence[int]) -> None:
        self.sizes, self._empty = list(sizes), partial(torch.empty, x.shape, dtype=x.dtype, device=x.device)
        self._whole: Tensor | None = None

    def part(self, number: int) -> Tensor:
        if self._whole is None:
            self._whole = self._empty()
        part: Tensor = self._whole.split(self.sizes, dim=-1)[number]
        return part

    def join(self, gradients: Sequence[Tensor]) -> Tensor:
        for number, gradient in enumerate(gradients):
            place = self.part(number)
            if not _is_same_memory(gradient, place):
                place.copy_(gradient)
        whole, self._whole = self._whole, None
        assert whole is not None
        return whole


def _is_same_memory(x: Tensor, y: Tensor) -> bool:
    strides = zip(x.shape, x.stride(), y.stride(), strict=True)
    return x.data_ptr() == y.data_ptr() and all(size == 1 or one == other for size, one, other in strides)


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: _Gradient) -> tuple[Tensor, ...]:
        ctx.gradient = gradient
        parts: tuple[Tensor, ...] = x.split(gradient.sizes, dim=-1)
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.join(gradients), None
