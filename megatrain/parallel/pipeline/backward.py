"""The backward pass of a segment, begun by the gradient of what it gave."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def run_backward(output: Tensor, gradient: Tensor | None) -> None:
    """Add up the gradients of all that `output` was made of; None: it is the loss."""
    torch.autograd.backward(output if gradient is None else _Seed.apply(output, gradient))


class _Seed(Function):
    """A number whose gradient makes `gradient` that of `output`.

    torch.autograd.backward imports sympy where it is given gradients, to compare sizes that are symbols: 2 s.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        assert gradient.shape == output.shape
        ctx.gradient = gradient
        return output.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004 (autograd's signature)
        return ctx.gradient, None
