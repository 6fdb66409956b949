"""Attention with a mask of keys and a bias of scores, for any numbers of queries and keys.

    fused_masked_attention     on GPUs, in bf16 and fp16: no scores in memory, padding, a bias of distances, dropout
    masked_attention           torch's SDPA, with a mask and a bias in memory
    eager_masked_attention     all scores in memory; the reference

Shapes: q and the result [sq, b, n, d], k and v [sk, b, g, d]. Every query has a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.attention.interface import DistanceBias, MaskSpec
from megatrain.kernels.attention.torch_sdpa import sdpa
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fused import attention as fused
from megatrain.kernels.sums import ColumnSums


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, bias: Tensor | None, scale: float
) -> Tensor:
    """Compute attention by torch's SDPA.

    Args:
        mask: True where a query attends to a key, bool, expands to [b, n, sq, sk]; None: everywhere.
        bias: added to scaled scores, expands to the same; None: none.
    """
    if mask is None:
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q.device)
    if bias is not None:
        mask = bias.to(q.dtype).masked_fill(~mask, float("-inf"))
    backend = "sdpa" if bias is None else "biased"
    return sdpa(q, k, v, backend, scale=scale, mask=mask.expand(-1, -1, q.shape[0], k.shape[0]))


def eager_masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    bias: Tensor | None,
    scale: float,
    kept: Tensor | None = None,
) -> Tensor:
    """Compute the same with all scores in memory, in the accumulation dtype; the reference.

    Args:
        kept: factor of each probability, [b, n, sq, sk]: 0 where dropout drops it; None: no dropout.
    """
    kind, copies = accumulation_dtype(q.dtype), q.shape[2] // k.shape[2]
    queries, keys, values = (x.permute(1, 2, 0, 3).to(kind) for x in (q, k, v))  # [b, n, s, d]
    keys, values = (x.repeat_interleave(copies, dim=1) if copies > 1 else x for x in (keys, values))
    scores = (queries * scale) @ keys.mT
    if bias is not None:
        scores = scores + bias.to(kind)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    probs = scores.softmax(-1)
    if kept is not None:
        probs = probs * kept.to(kind)
    return (probs @ values).permute(2, 0, 1, 3).to(q.dtype)


def fused_masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskSpec,
    *,
    bias: DistanceBias | None,
    scale: float,
    sums: Sequence[ColumnSums] = (),
) -> Tensor:
    """Compute attention by megatrain's kernel.

    Args:
        mask: causality, padding and dropout.
        bias: added to scaled scores, in fp32; None: none.
        sums: of the gradients of q, k and v as columns of one tensor, or of q, and of k and v.
    """
    out: Tensor = _FusedMaskedAttention.apply(q, k, v, bias, mask, scale, sums)
    return out


class _FusedMaskedAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: DistanceBias | None,
        mask: MaskSpec,
        scale: float,
        sums: Sequence[ColumnSums],
    ) -> Tensor:
        kept, masks = fused.memory_for_mask(q, k, mask.dropout), fused.prepared(q, k, mask, bias)
        out, lse = fused.forward(q, k, v, mask, scale=scale, softcap=None, bias=bias, kept=kept, masks=masks)
        ctx.save_for_backward(q, k, v, out, lse, kept, *masks)
        ctx.bias, ctx.mask, ctx.scale, ctx.sums = bias, mask, scale, sums
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, kept, *masks = ctx.saved_tensors
        *found, dtable, sums = fused.backward(
            grads[0], q, k, v, out, lse, ctx.mask, scale=ctx.scale, softcap=None, bias=ctx.bias, kept=kept,
            masks=fused.Prepared(*masks), has_sums=bool(ctx.sums),
        )  # fmt: skip
        if sums is not None:
            for left, parts in zip(
                ctx.sums, [(x,) for x in sums] if len(ctx.sums) > 1 else [sums], strict=True
            ):
                left.parts = parts
        if dtable is not None and ctx.bias.table_grad is not None:
            ctx.bias.table_grad.add_(dtable)
        return *found, None, None, None, None
