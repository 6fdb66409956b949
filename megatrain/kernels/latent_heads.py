"""Heads of multi-latent attention: RoPE, and keys and values expanded from one projection of their latent.

    q    [s, b, n, c + r]   c plain channels, then r channels to which RoPE is applied
    kv   [s, b, n, c + v]   plain channels of keys, then values      ─┬─> k [s, b, n, c + r]
    key  [s, b, r]          rotary channels of keys, for all heads   ─┘   v [s, b, n, v], a view of kv

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.kernels import rotary


class Heads(NamedTuple):
    """Queries, keys and values."""

    q: Tensor
    k: Tensor
    v: Tensor


class ProjectionGradients(NamedTuple):
    """Gradients of the tensors that `expand_heads` takes."""

    dq: Tensor
    dkv: Tensor
    dkey: Tensor


def expand_heads(
    q: Tensor, kv: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool
) -> Heads:
    """Return the heads. Queries are in the memory of `q`, which must not be reused.

    Args:
        cos, sin: tables of the positions in the accumulation dtype, [s, 1, 1, at most r/2].
    """
    plain = q.shape[-1] - key.shape[-1]
    rotary_q = q[..., plain:]
    rotary_q.copy_(rotary.apply_rope(rotary_q, cos, sin, is_interleaved=is_interleaved))
    k = kv.new_empty((*kv.shape[:-1], q.shape[-1]))
    k[..., :plain] = kv[..., :plain]
    k[..., plain:] = rotary.apply_rope(key.unsqueeze(2), cos, sin, is_interleaved=is_interleaved)
    return Heads(q, k, kv[..., plain:])


def expand_heads_backward(
    gradients: Heads, num_rotary: int, cos: Tensor, sin: Tensor, *, is_interleaved: bool
) -> ProjectionGradients:
    """Return the gradients of `expand_heads`. The gradient of `key` is the sum over the heads of this rank."""
    dq, dk, dv = gradients
    plain = dq.shape[-1] - num_rotary

    def unrotated(x: Tensor) -> Tensor:
        return rotary.apply_rope(x, cos, sin, is_interleaved=is_interleaved, is_backward=True)

    dkey = unrotated(dk[..., plain:].sum(2, keepdim=True, dtype=cos.dtype)).squeeze(2)
    return ProjectionGradients(
        torch.cat((dq[..., :plain], unrotated(dq[..., plain:])), dim=-1),
        torch.cat((dk[..., :plain], dv), dim=-1),
        dkey.to(dk.dtype),
    )
