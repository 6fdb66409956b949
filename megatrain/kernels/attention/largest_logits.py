"""The largest attention logit of each head in a block of queries and keys, whose scores are in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.attention.interface import MaskSpec
from megatrain.kernels.dtypes import accumulation_dtype


def largest_logits(q: Tensor, k: Tensor, mask: MaskSpec, scale: float) -> Tensor:
    """Return the largest of scale * q k^T over the pairs that a mask allows: [n] in the accumulation dtype, -inf without pairs.

    Args:
        q: queries, [sq, b, n, d].
        k: keys, [sk, b, g, d].
        mask: explicit, or causal for a square block.
        scale: factor of the scores, above 0.
    """
    (sq, b, n, d), (sk, _, g, _) = q.shape, k.shape
    queries = q.permute(1, 2, 0, 3).reshape(b * g, n // g * sq, d)
    keys = k.permute(1, 2, 3, 0).reshape(b * g, d, sk)
    scores = _product(queries, keys).view(b, n, sq, sk)
    allowed = mask.explicit
    if allowed is None and mask.is_causal:
        allowed = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril()
    if allowed is not None:
        scores.masked_fill_(~allowed, float("-inf"))
    return scores.amax((0, 2, 3)) * scale


def _product(queries: Tensor, keys: Tensor) -> Tensor:
    """Multiply batches of matrices; products of bf16 are not rounded to it."""
    dtype = accumulation_dtype(queries.dtype)
    if queries.is_cuda and queries.dtype != dtype:
        return torch.bmm(queries, keys, out_dtype=dtype)
    return queries.to(dtype) @ keys.to(dtype)
