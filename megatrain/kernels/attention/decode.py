"""Attention of one new token per sequence to the rows of its sequence in a cache.

    k, v [b, g, d] ─> rows `written`          q [b, n, d] ─> rows first ... first + count - 1 of its sequence ─> [b, n, dv]

On GPUs, except in fp64, fused kernels compute it without waiting for the host, which does not know the lengths. The
references run in any dtype on any device, sequence by sequence: the host reads the lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fused import decode_attention as fused
from megatrain.kernels.fused.launching import is_fused


def write_rows(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, written: Tensor) -> None:
    """Write the rows of new tokens.

    Args:
        keys, values: rows of the cache, [r, g, d] and [r, g, dv].
        k, v: new rows, [b, g, d] and [b, g, dv].
        written: row of each sequence, int64 [b].
    """
    if is_fused(k):
        fused.write_rows(keys, values, k, v, written)
    else:
        keys.index_copy_(0, written, k.to(keys.dtype))
        values.index_copy_(0, written, v.to(values.dtype))


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    first: Tensor,
    count: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Attend from the last row of each sequence.

    Args:
        q: [b, n, d]; n is a multiple of g: consecutive query heads share a group.
        keys, values: rows of the cache, [r, g, d] and [r, g, dv].
        first, count: first row of each sequence and number of its rows, at least 1, int64 [b].
        softcap: bound of the scaled scores; None: none.
        window: rows before the last one that are seen; None: all.
        sink: sink logits [n], which enter the softmax denominator.
    Returns:
        [b, n, dv] in the dtype of `q`.
    """
    if is_fused(q):
        return fused.decode_attention(
            q, keys, values, first, count, scale=scale, softcap=softcap, window=window, sink=sink
        )
    dtype, groups = accumulation_dtype(q.dtype), keys.shape[1]
    out = []
    for one, start, length in zip(q, first.tolist(), count.tolist(), strict=True):
        seen = length if window is None else min(length, window + 1)
        rows = slice(start + length - seen, start + length)
        k, v = (x[rows].to(dtype).transpose(0, 1) for x in (keys, values))  # [g, rows, channels]
        scores = one.to(dtype).unflatten(0, (groups, -1)) @ k.transpose(1, 2) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if sink is not None:
            column = sink.to(dtype).view(groups, -1, 1)
            scores = torch.cat((scores, column), dim=-1)
        probs = scores.softmax(-1)[..., :seen]
        out.append((probs @ v).flatten(0, 1))
    return torch.stack(out).to(q.dtype)
