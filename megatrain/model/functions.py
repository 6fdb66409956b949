"""Autograd functions around kernels: they choose the saved tensors and add weight gradients to the gradient buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels import norms, rotary
from megatrain.kernels.attention.interface import AttentionKernel, MaskSpec
from megatrain.kernels.conjugate import Conjugate
from megatrain.kernels.qkv import concat_heads
from megatrain.kernels.sums import add_column_sums
from megatrain.parallel.layout import ShardedModule
from megatrain.parallel.tensor_overlap.terms import PendingTerm


def norm(
    x: Tensor,
    delta: Tensor | None,
    module: ShardedModule,
    eps: float,
    offset: float,
    dy_term: PendingTerm | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute x + delta and its norm with the module's `weight` and, if it has one, `bias`; saves the sum. Its backward pass adds `dy_term`."""
    grads, bias = module.weight_grads, getattr(module, "bias", None)
    total, y = _Norm.apply(
        x, delta, module.weight, bias, grads.get("weight"), grads.get("bias"), eps, offset, dy_term
    )
    return total, y


def recompute_norm(total: Tensor, module: ShardedModule, eps: float, offset: float) -> Tensor:
    """Compute the norm that `norm` returned with this sum, bit for bit, without autograd."""
    assert isinstance(module.weight, Tensor)
    with torch.no_grad():
        return norms.norm(total, None, module.weight, getattr(module, "bias", None), eps, offset).y


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> Tensor:
    """Apply RoPE (`kernels.rotary.apply_rope`); saves only the tables."""
    out: Tensor = _ApplyRope.apply(x, cos, sin, is_interleaved)
    return out


def apply_rope_to_qkv(
    qkv: Tensor, sizes: Sequence[int], cos: Tensor, sin: Tensor, *, is_interleaved: bool
) -> tuple[Tensor, ...]:
    """Split [s, b, heads, d] and apply RoPE to the first two parts, queries and keys, in place; saves only the tables.

    Neither `qkv` nor the gradients of the results may be reused.
    """
    parts: tuple[Tensor, ...] = _ApplyRopeToQkv.apply(qkv, sizes, cos, sin, is_interleaved)
    return parts


def split_heads(qkv: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Split [s, b, heads, d] into parts of these sizes; gradients in adjacent memory are joined without a copy."""
    parts: tuple[Tensor, ...] = Conjugate.apply(
        lambda qkv: tuple(qkv.split(list(sizes), dim=2)), lambda *grads: concat_heads(grads), qkv
    )
    return parts


def attend(q: Tensor, k: Tensor, v: Tensor, kernel: AttentionKernel, mask: MaskSpec) -> Tensor:
    """Compute attention of q [s, b, n, d] to k and v [s, b, g, d] by one call of a kernel."""
    out: Tensor = _Attend.apply(q, k, v, kernel, mask)
    return out


def as_leaf(weight: Tensor, weight_grad: Tensor | None) -> Tensor:
    """Return the weight for use in plain autograd, which adds its gradient to `weight_grad`; for small weights."""
    out: Tensor = _AsLeaf.apply(weight, weight_grad)
    return out


def weight_of(module: ShardedModule, name: str) -> Tensor:
    """Return a small parameter of a module for use in plain autograd, which adds its gradient to the gradient buffer."""
    return as_leaf(getattr(module, name), module.weight_grads.get(name))


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
        dy_term: PendingTerm | None,
    ) -> tuple[Tensor, Tensor]:
        normed = norms.norm(x, delta, weight, bias, eps, offset)
        ctx.save_for_backward(normed.total, weight, normed.mean, normed.rstd)
        ctx.grads, ctx.delta, ctx.offset = (
            (weight_grad, bias_grad),
            None if delta is None else delta.shape,
            offset,
        )
        ctx.dy_term = dy_term
        ctx.set_materialize_grads(False)
        return normed.total, normed.y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dtotal, dy = grads
        total, weight, mean, rstd = ctx.saved_tensors
        assert dy is not None
        normed = norms.NormOutput(total, total, mean, rstd)
        dy_term = None if ctx.dy_term is None else ctx.dy_term.take()
        dx, rows = norms.norm_backward(dy, dtotal, normed, weight, ctx.offset, dy_term)
        weight_grad, bias_grad = ctx.grads
        if weight_grad is not None and (bias_grad is not None or mean is None):
            add_column_sums(weight_grad, rows, bias_grad)
        elif weight_grad is not None or bias_grad is not None:  # layers of the user's own may freeze one
            for grad, part in zip(ctx.grads, rows.tensor_split(2, dim=1), strict=True):
                if grad is not None:
                    add_column_sums(grad, part)
        return dx, None if ctx.delta is None else dx.expand(ctx.delta), *[None] * 7


class _ApplyRope(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.is_interleaved = is_interleaved
        return rotary.apply_rope(x, cos, sin, is_interleaved=is_interleaved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        dx = rotary.apply_rope(grads[0], cos, sin, is_interleaved=ctx.is_interleaved, is_backward=True)
        return dx, None, None, None


class _ApplyRopeToQkv(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, sizes: Sequence[int], cos: Tensor, sin: Tensor, is_interleaved: bool
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.is_interleaved = is_interleaved
        return rotary.apply_rope_to_qkv(qkv.detach(), sizes, cos, sin, is_interleaved=is_interleaved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        dqkv = rotary.apply_rope_to_qkv_backward(grads, cos, sin, is_interleaved=ctx.is_interleaved)
        return dqkv, None, None, None, None


class _Attend(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionKernel, mask: MaskSpec) -> Tensor:
        out, lse = kernel.forward(q, k, v, mask)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel, ctx.mask = kernel, mask
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.kernel.backward(grads[0], *ctx.saved_tensors, ctx.mask), None, None


class _AsLeaf(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, weight_grad: Tensor | None) -> Tensor:
        ctx.weight_grad = weight_grad
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.weight_grad.add_(grads[0])
        return None, None
