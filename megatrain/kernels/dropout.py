"""Dropout by rows: the mask is a function of a key, a row's number and the column, and is computed again in the backward pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.fused import random as fused
from megatrain.kernels.fused.launching import is_fused
from megatrain.kernels.random import keep_mask


def drop(x: Tensor, rows: Tensor, *, key: int, p: float) -> Tensor:
    """Return x / (1 - p) where the mask of `keep_mask` is True, else 0.

    Args:
        x: [..., columns].
        rows: number in the run of each row, int64 [...].
        key: from `stream_key`.
    """
    out: Tensor = _Drop.apply(x, rows, key, p)
    return out


def drop_reference(x: Tensor, rows: Tensor, key: int, p: float) -> Tensor:
    """Compute it with torch operators."""
    return (x / (1 - p)).masked_fill_(~keep_mask(rows, x.shape[-1], key=key, p=p), 0)


class _Drop(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, key: int, p: float) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.key, ctx.p = key, p
        return _dropped(x, rows, key, p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return _dropped(grads[0], rows, ctx.key, ctx.p), None, None, None


def _dropped(x: Tensor, rows: Tensor, key: int, p: float) -> Tensor:
    return (fused.drop if is_fused(x) else drop_reference)(x, rows, key, p)
