"""Heads of multi-latent attention: RoPE of queries, and keys and values expanded from one projection of their latent.

    q    [s, b, n, c + r]   c plain channels, then r channels to which RoPE is applied
    kv   [s, b, n, c + v]   plain channels of keys, then values      ─┬─> k [s, b, n, c + r]
    key  [s, b, 1, r]       rotary channels of keys, for all heads   ─┘   v [s, b, n, v], a view of kv

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.3.
"""

from __future__ import annotations

from torch import Tensor

from megatrain.kernels import rotary
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.qkv import concat, copy_heads


def rotate_queries(
    q: Tensor, num_rotary: int, cos: Tensor, sin: Tensor, *, is_interleaved: bool, is_backward: bool = False
) -> Tensor:
    """Apply RoPE to the last `num_rotary` channels of each head, in place.

    Args:
        cos, sin: tables of the positions in the accumulation dtype, [s, 1, 1, at most r/2].
        is_backward: rotate gradients by the negative angle.
    """
    part = q[..., -num_rotary:]
    rotary.rotate(part, cos, sin, is_interleaved=is_interleaved, is_backward=is_backward)
    return q


def expand_keys(kv: Tensor, key: Tensor, plain: int) -> tuple[Tensor, Tensor]:
    """Return keys and values. `key` has RoPE already.

    Args:
        plain: number of channels of keys in `kv`.
    """
    k = kv.new_empty((*kv.shape[:-1], plain + key.shape[-1]))
    copy_heads(k[..., :plain], kv[..., :plain])
    copy_heads(k[..., plain:], key)
    return k, kv[..., plain:]


def expand_keys_backward(dk: Tensor, dv: Tensor, plain: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of `kv` and `key`, the latter summed over the heads of this rank."""
    dkey = dk[..., plain:].sum(2, keepdim=True, dtype=accumulation_dtype(dk.dtype))
    return concat((dk[..., :plain], dv), dim=-1), dkey.to(dk.dtype)
