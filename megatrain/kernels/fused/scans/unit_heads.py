"""Heads of length 1, `kernels.gated_delta.unit_heads` on GPUs, in one pass each way; only the input is saved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.fused.launching import cdiv, jit, launch, power_of_two, tl
from megatrain.kernels.fused.scans.chunks import with_contiguous_channels
from megatrain.kernels.qkv import Place

_TILE = 2048
"""Elements per tile, unless a head is longer."""


def unit_heads(x: Tensor, scale: float, min_square: float, place: Place | None = None) -> Tensor:
    """Implement `kernels.gated_delta.unit_heads`."""
    y: Tensor = _UnitHeads.apply(x, scale, min_square, place)
    return y


class _UnitHeads(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, min_square: float, place: Place | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.constants, ctx.place = (scale, min_square), place
        x, y = with_contiguous_channels(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _launch(x, x, y, *ctx.constants, is_backward=False)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x = with_contiguous_channels(ctx.saved_tensors[0])
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if ctx.place is not None:
            dx = ctx.place().unflatten(-1, x.shape[2:])
        _launch(dy.contiguous(), x, dx, *ctx.constants, is_backward=True)
        return dx, None, None, None


def _launch(
    dy: Tensor, x: Tensor, out: Tensor, scale: float, min_square: float, *, is_backward: bool
) -> None:
    n, d = x.shape[2:]
    count, block = x.numel() // d, power_of_two(d)
    rows = max(_TILE // block, 1)
    launch(
        _kernel, (cdiv(count, rows),), dy, x, out, count, n, d, *_strides(x), *_strides(out), scale, min_square,
        IS_BACKWARD=is_backward, ROWS=rows, BLOCK=block, num_warps=4,
    )  # fmt: skip


def _strides(x: Tensor) -> tuple[int, int]:
    """Return the strides of tokens and heads of x [s, b, n, d], whose tokens are one axis."""
    tokens = x.flatten(0, 1)
    assert tokens.data_ptr() == x.data_ptr()
    return tokens.stride(0), tokens.stride(1)


@jit
def _kernel(
    DY, X, OUT, count, n, d, x_token, x_head, out_token, out_head, scale, min_square,
    IS_BACKWARD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write y, or dx from DY, which is contiguous."""
    head, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (head < count)[:, None] & (column < d)[None, :]
    token, number = head // n, head % n
    x = tl.load(X + (token * x_token + number * x_head)[:, None] + column[None, :], mask=inside, other=0)
    x = x.to(tl.float32)
    inverse = (1 / tl.sqrt(tl.sum(x * x, axis=1) + min_square))[:, None]
    out = x * inverse
    if IS_BACKWARD:
        dy = tl.load(DY + head[:, None] * d + column[None, :], mask=inside, other=0).to(tl.float32)
        out = (dy - out * tl.sum(dy * out, axis=1)[:, None]) * inverse
    place = OUT + (token * out_token + number * out_head)[:, None] + column[None, :]
    tl.store(place, (out * scale).to(OUT.dtype.element_ty), mask=inside)
