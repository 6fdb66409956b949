"""Heads turned by rotary tables: each pair of channels by the angle of its position.

    (a, b) -> (a cos - b sin, b cos + a sin)          backwards with -sin

Pairs are channels i and i + c/2 of the c that are turned, or neighbours; a head's other channels pass. On GPUs one
fused kernel does it, in place where heads come out of a linear layer; the references here do the same in any dtype on
any device.

Source: RoFormer, arXiv:2104.09864, section 3.4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.kernels.fused import apply_rope as fused
from megatrain.kernels.fused.launching import is_fused


def turn(x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool, is_back: bool = False) -> Tensor:
    """Turn queries or keys.

    Args:
        x: [s, b, n, d].
        cos, sin: wide tables of the positions, [s, 1, 1, c/2].
        is_interleaved: whether neighbouring channels are pairs.
        is_back: turns the other way, which is the gradient.
    Returns:
        [s, b, n, d] in the dtype of `x`.
    """
    implementation = fused.turn if is_fused(x) else turn_reference
    return implementation(x, cos, sin, is_interleaved=is_interleaved, is_back=is_back)


def turn_heads(
    qkv: Tensor, sizes: Sequence[int], cos: Tensor, sin: Tensor, *, is_interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys turned, and values, from [s, b, n + 2 g, d]; on GPUs the memory of `qkv` is theirs.

    Args:
        sizes: heads of each.
    """
    implementation = fused.turn_heads if is_fused(qkv) else turn_heads_reference
    return implementation(qkv, sizes, cos, sin, is_interleaved=is_interleaved)


def turn_heads_backward(
    gradients: Sequence[Tensor], cos: Tensor, sin: Tensor, *, is_interleaved: bool
) -> Tensor:
    """Gradient of `turn_heads`, [s, b, n + 2 g, d], from those of queries, keys and values, whose memory is used up."""
    implementation = fused.turn_heads_backward if is_fused(gradients[0]) else turn_heads_backward_reference
    return implementation(gradients, cos, sin, is_interleaved=is_interleaved)


def turn_reference(
    x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool, is_back: bool = False
) -> Tensor:
    """The same, written out."""
    channels = 2 * cos.shape[-1]
    xw = x[..., :channels].to(cos.dtype)
    a, b = (xw[..., 0::2], xw[..., 1::2]) if is_interleaved else xw.chunk(2, dim=-1)
    sin = -sin if is_back else sin
    pairs = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pairs, dim=-1).flatten(-2) if is_interleaved else torch.cat(pairs, dim=-1)
    turned = turned.to(x.dtype)
    return torch.cat((turned, x[..., channels:]), dim=-1) if channels < x.shape[-1] else turned


def turn_heads_reference(
    qkv: Tensor, sizes: Sequence[int], cos: Tensor, sin: Tensor, *, is_interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, written out."""
    q, k, v = qkv.split(list(sizes), dim=2)
    q, k = (turn_reference(x, cos, sin, is_interleaved=is_interleaved) for x in (q, k))
    return q, k, v


def turn_heads_backward_reference(
    gradients: Sequence[Tensor], cos: Tensor, sin: Tensor, *, is_interleaved: bool
) -> Tensor:
    """The same, written out."""
    dq, dk = (turn_reference(x, cos, sin, is_interleaved=is_interleaved, is_back=True) for x in gradients[:2])
    return torch.cat((dq, dk, gradients[2]), dim=2)
