"""Split channels; kernels write the gradients of the parts into one tensor, so that nothing concatenates them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

Place = Callable[[], Tensor]
"""Returns the memory of the gradient of a part, [s, b, channels], during a backward pass."""


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
        return self._whole.split(self.sizes, dim=-1)[number]

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
        return x.split(gradient.sizes, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.join(gradients), None
