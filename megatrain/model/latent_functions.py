"""Autograd functions around the kernels of multi-latent attention; they save no heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from megatrain.kernels import latent_heads
from megatrain.kernels.conjugate import Conjugate


def rotate_queries(q: Tensor, num_rotary: int, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> Tensor:
    """Apply RoPE to the last channels of heads in place (`kernels.latent_heads`); saves only the tables.

    Neither `q` nor the gradient of the result may be reused.
    """
    out: Tensor = _RotateQueries.apply(q, num_rotary, cos, sin, is_interleaved)
    return out


def expand_keys(kv: Tensor, key: Tensor, plain: int) -> tuple[Tensor, Tensor]:
    """Compute keys and values of multi-latent attention (`kernels.latent_heads`); saves nothing."""
    k, v = Conjugate.apply(
        lambda kv, key: latent_heads.expand_keys(kv.detach(), key, plain),
        lambda dk, dv: latent_heads.expand_keys_backward(dk, dv, plain),
        kv,
        key,
    )
    return k, v


class _RotateQueries(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, num_rotary: int, cos: Tensor, sin: Tensor, is_interleaved: bool
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.num_rotary, ctx.is_interleaved = num_rotary, is_interleaved
        return latent_heads.rotate_queries(q.detach(), num_rotary, cos, sin, is_interleaved=is_interleaved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kind = {"is_interleaved": ctx.is_interleaved, "is_backward": True}
        dq = latent_heads.rotate_queries(grads[0], ctx.num_rotary, *ctx.saved_tensors, **kind)
        return dq, None, None, None, None
