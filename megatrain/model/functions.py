"""The kernels as autograd functions: what they keep for the backward pass, and where weight gradients go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels import apply_rope, norms
from megatrain.kernels.attention.blocks import AttentionKernel, View
from megatrain.kernels.dtypes import wide
from megatrain.kernels.heads import joined_heads
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.layout import LaidOutModule


def norm(
    x: Tensor, delta: Tensor | None, holder: LaidOutModule, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """`kernels.norms.norm` with the holder's `weight` and, if it has one, `bias`: the sum and its norm; keeps the sum."""
    grads, bias = holder.weight_grads, getattr(holder, "bias", None)
    total, y = _Norm.apply(x, delta, holder.weight, bias, grads.get("weight"), grads.get("bias"), eps, offset)
    return total, y


def norm_again(total: Tensor, holder: LaidOutModule, eps: float, offset: float) -> Tensor:
    """The norm that `norm` gave with this sum, to the last bit; autograd does not see it."""
    assert isinstance(holder.weight, Tensor)
    with torch.no_grad():
        return norms.norm(total, None, holder.weight, getattr(holder, "bias", None), eps, offset).y


def split_rms_norm(x: Tensor, holder: LaidOutModule, eps: float, offset: float, group: RankGroup) -> Tensor:
    """RMSNorm over channels that are split over the ranks of a group: [..., c/tp], with this rank's part of the weight."""
    out: Tensor = _SplitRmsNorm.apply(x, holder.weight, holder.weight_grads.get("weight"), eps, offset, group)
    return out


def turn(x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> Tensor:
    """`kernels.turning.turn`; keeps nothing but the tables."""
    out: Tensor = _Turn.apply(x, cos, sin, is_interleaved)
    return out


def turn_heads(
    qkv: Tensor, sizes: Sequence[int], cos: Tensor, sin: Tensor, *, is_interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.turning.turn_heads`; keeps nothing but the tables. Nothing may read `qkv` afterwards, nor the results' gradients."""
    q, k, v = _TurnHeads.apply(qkv, sizes, cos, sin, is_interleaved)
    return q, k, v


def split_heads(qkv: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of [s, b, n + 2 g, d]; gradients that lie as these did are its gradient, without a copy."""
    q, k, v = _SplitHeads.apply(qkv, sizes)
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, kernel: AttentionKernel, view: View) -> Tensor:
    """Attention of queries [s, b, n, d] to keys and values [s, b, g, d] that are all here."""
    out: Tensor = _Attend.apply(q, k, v, kernel, view)
    return out


def as_leaf(weight: Tensor, weight_grad: Tensor | None) -> Tensor:
    """The weight, for small ones that plain autograd works with: its gradient goes to `weight_grad`."""
    out: Tensor = _AsLeaf.apply(weight, weight_grad)
    return out


def drop(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """x / (1 - p) where `kept`, else 0; keeps the mask."""
    out: Tensor = _Drop.apply(x, kept, p)
    return out


class _Norm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        weight_grad: Tensor | None,
        bias_grad: Tensor | None,
        eps: float,
        offset: float,
    ) -> tuple[Tensor, Tensor]:
        known = norms.norm(x, delta, weight, bias, eps, offset)
        ctx.save_for_backward(known.total, weight, known.mean, known.rstd)
        ctx.grads, ctx.has_delta, ctx.offset = (weight_grad, bias_grad), delta is not None, offset
        ctx.set_materialize_grads(False)
        return known.total, known.y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dtotal, dy = grads
        total, weight, mean, rstd = ctx.saved_tensors
        assert dy is not None
        known = norms.Normed(total, total, mean, rstd)
        dx, dweight, dbias = norms.norm_backward(dy, dtotal, known, weight, ctx.offset)
        weight_grad, bias_grad = ctx.grads
        weight_grad.add_(dweight)
        if dbias is not None:
            bias_grad.add_(dbias)
        return dx, dx if ctx.has_delta else None, None, None, None, None, None, None


class _SplitRmsNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        weight_grad: Tensor | None,
        eps: float,
        offset: float,
        group: RankGroup,
    ) -> Tensor:
        xw = x.to(wide(x.dtype))
        squares = all_reduce(xw.square().sum(-1, keepdim=True), group)
        rstd = (squares / (x.shape[-1] * group.size) + eps).rsqrt()
        ctx.save_for_backward(x, weight, rstd)
        ctx.weight_grad, ctx.offset, ctx.group = weight_grad, offset, group
        return (xw * rstd * (weight.to(xw.dtype) + offset)).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        normed = x.to(rstd.dtype) * rstd
        dy = grads[0].to(rstd.dtype)
        ctx.weight_grad.add_((dy * normed).flatten(0, -2).sum(0))
        dnormed = dy * (weight.to(rstd.dtype) + ctx.offset)
        along = all_reduce((dnormed * normed).sum(-1, keepdim=True), ctx.group)
        dx = rstd * (dnormed - normed * (along / (x.shape[-1] * ctx.group.size)))
        return dx.to(x.dtype), None, None, None, None, None


class _Turn(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.is_interleaved = is_interleaved
        return apply_rope.turn(x, cos, sin, is_interleaved=is_interleaved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        dx = apply_rope.turn(grads[0], cos, sin, is_interleaved=ctx.is_interleaved, is_back=True)
        return dx, None, None, None


class _TurnHeads(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, sizes: Sequence[int], cos: Tensor, sin: Tensor, is_interleaved: bool
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.is_interleaved = is_interleaved
        return apply_rope.turn_heads(qkv.detach(), sizes, cos, sin, is_interleaved=is_interleaved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        dqkv = apply_rope.turn_heads_backward(grads, cos, sin, is_interleaved=ctx.is_interleaved)
        return dqkv, None, None, None, None


class _SplitHeads(Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:  # noqa: ARG004 (autograd's signature)
        q, k, v = qkv.split(list(sizes), dim=2)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return joined_heads(grads), None


class _Attend(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionKernel, view: View) -> Tensor:
        out, lse = kernel.forward(q, k, v, view)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel, ctx.view = kernel, view
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.kernel.backward(grads[0], *ctx.saved_tensors, ctx.view), None, None


class _AsLeaf(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, weight_grad: Tensor | None) -> Tensor:
        ctx.weight_grad = weight_grad
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.weight_grad.add_(grads[0])
        return None, None


class _Drop(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.p = p
        return (x / (1 - p)).masked_fill(~kept, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return (grads[0] / (1 - ctx.p)).masked_fill(~kept, 0), None, None
