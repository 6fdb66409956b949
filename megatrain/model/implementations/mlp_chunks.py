"""A dense MLP whose tokens are computed in chunks, so that the wide tensors of one chunk are in memory at a time.

    forward     chunk 0 | chunk 1 | ...           norm, fc1, activation, fc2; only the inputs are kept
    backward    chunk 0 forward, backward | chunk 1 forward, backward | ...

Each token's result has the bits of the whole MLP's where the GEMMs give a row the same bits in any batch, and its dropout of adapters the
same mask; weight gradients add a sum a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megatrain.model.layer import Mlp
from megatrain.parallel.batch import PassInfo


class ChunkedMlp(nn.Module):
    """An MLP computed in chunks of at most `rows` rows of the residual stream, and a second time in the backward pass."""

    def __init__(self, mlp: Mlp, rows: int) -> None:
        super().__init__()
        self.module = mlp
        self.rows = rows

    def forward(self, residual: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor | None]:
        inputs: Tensor = _Inputs.apply(residual, delta)
        total, y = _Chunks.apply(residual, delta, inputs, self, info)
        return self.module.output.add_to(total, y, info)

    def linears(self, residual: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor]:
        """Return residual + delta and the output of fc2 for some rows."""
        total, x = self.module.fc1(residual, delta, info)
        return total, self.module.fc2(x, info)


class _Inputs(Function):
    """Keeps the inputs of the chunks, before these are computed: a recomputed layer needs nothing that follows, and stops here."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, delta: Tensor | None) -> Tensor:
        ctx.save_for_backward(residual, delta)
        ctx.set_materialize_grads(False)
        return residual.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: None) -> tuple[None, None]:  # noqa: ARG004 (autograd's signature)
        return None, None


class _Chunks(Function):
    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, delta: Tensor | None, inputs: Tensor, mlp: ChunkedMlp, info: PassInfo
    ) -> tuple[Tensor, Tensor]:
        ctx.inputs, ctx.mlp, ctx.info = inputs.grad_fn, mlp, info
        ctx.set_materialize_grads(False)
        outputs: list[Tensor] = []
        for rows, part_info in _parts(len(residual), mlp.rows, info):
            found = mlp.linears(residual[rows], None if delta is None else delta[rows], part_info)
            outputs = outputs or [x.new_empty(len(residual), *x.shape[1:]) for x in found]
            for whole, part in zip(outputs, found, strict=True):
                whole[rows] = part
        total, y = outputs
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        residual, delta = ctx.inputs.saved_tensors
        residual, delta = residual.detach(), None if delta is None else delta.detach()
        dx = torch.empty_like(residual)
        for rows, info in _parts(len(residual), ctx.mlp.rows, ctx.info):
            x = residual[rows].requires_grad_()  # the gradient of delta is the same
            with torch.enable_grad():
                outputs = ctx.mlp.linears(x, None if delta is None else delta[rows], info)
                root = _Root.apply([None if dy is None else dy[rows] for dy in grads], *outputs)
            del outputs
            torch.autograd.backward(root)
            assert x.grad is not None
            dx[rows] = x.grad
        return dx, None if delta is None else dx.to(delta.dtype), None, None, None


class _Root(Function):
    """A scalar whose backward pass begins with these gradients of the outputs.

    torch.autograd.backward imports sympy if it is given gradients: 2 s.
    """

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor | None], *outputs: Tensor) -> Tensor:
        ctx.grads = grads
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004 (autograd's signature)
        return None, *ctx.grads


def _parts(count: int, rows: int, info: PassInfo) -> Iterator[tuple[slice, PassInfo]]:
    """Yield the rows of each chunk, and the pass of these rows."""
    for first in range(0, count, rows):
        chunk = slice(first, min(first + rows, count))
        yield chunk, info.of_rows(chunk, count)
