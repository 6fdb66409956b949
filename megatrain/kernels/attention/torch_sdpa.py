"""torch's fused attention on one rank, differentiated by torch: SDPA, and variable-length FlashAttention-2.

Shapes: q and the result [s, b, n, d], k and v [s, b, g, d]. Attention is causal.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

_BACKENDS = {
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "flash2": [SDPBackend.FLASH_ATTENTION],
    "biased": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],  # those that differentiate a mask
}


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, backend: str, *, scale: float | None, mask: Tensor | None = None
) -> Tensor:
    """Compute SDPA by one backend of torch; `sdpa` leaves the choice to torch, `biased` too where it can differentiate the mask.

    Args:
        scale: factor of the scores; None: 1 / sqrt(d).
        mask: True where a query attends to a key, bool [b or 1, 1, s, s], or added to the scores; None: causal.
    """
    has_groups = k.shape[2] < q.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [b, n, s, d]
    with sdpa_kernel(_BACKENDS[backend]) if backend in _BACKENDS else nullcontext():
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=has_groups
        )
    return out.permute(2, 0, 1, 3)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Compute attention within documents by FlashAttention-2, without a mask in memory.

    Args:
        cu_seqlens: cumulative lengths of the documents in the concatenated samples, int32 [documents + 1].
        window: number of earlier tokens that a query attends to; None: all.
    """
    s, b = q.shape[:2]
    q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))  # [b * s, n, d]
    window_size = (-1 if window is None else window, 0)
    out: Tensor = _varlen_attn()(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, window_size=window_size, scale=scale
    )
    by_sample: Tensor = out.unflatten(0, (b, s))
    return by_sample.transpose(0, 1)


@functools.cache
def _varlen_attn() -> Callable[..., Any]:
    """Import torch's function at its first use: the import loads torch's compiler, which takes seconds."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415

    # torch 2.11 accepts grouped queries without this argument, later versions require it.
    needs_flag = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return functools.partial(varlen_attn, enable_gqa=True) if needs_flag else varlen_attn
