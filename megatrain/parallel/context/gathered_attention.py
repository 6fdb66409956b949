"""Attention of a context rank's rows to all-gathered keys and values (`--cp-comm-type all_gather`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.attention.interface import AttentionKernel, SoftmaxMerge, sink_gradient
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.parallel.collectives import begin_all_gather_into, begin_reduce_scatter_into
from megatrain.parallel.context.block_masks import BlockMasks, halves, key_range
from megatrain.parallel.context_parallel import ContextParallel


class AllGatherAttention(Function):
    """Attention of a rank's rows to all-gathered keys and values, with any window and any documents.

        chunks 0 .. cp-1   the ranks' first chunks, gathered in order      all that queries of the first chunk need
        cp .. 2 cp - 1     their second chunks, in reverse rank order      gathered while those queries are computed

    Each of a rank's two chunks attends causally to the range of keys that ends with it: windows and documents are plain
    variable-length cases, and no kernel needs an explicit mask. The backward pass gathers again, and reduce-scatters the
    gradients of keys and values, of second chunks while first chunks are computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        kernel: AttentionKernel,
        masks: BlockMasks,
        cp: ContextParallel,
    ) -> Tensor:
        parts = []
        keys = _GatheredKeys(k, v, masks.window, cp)
        for half, rows in enumerate(halves(q.shape[0])):
            half_k, half_v = keys.needed(half)
            found = kernel.forward(q[rows], half_k, half_v, masks.between(*keys.positions(half)))
            parts.append(SoftmaxMerge(*found))
            if sink is not None:
                parts[-1].add_sink(sink)
        out = torch.cat([part.out for part in parts]).to(q.dtype)
        ctx.save_for_backward(q, k, v, sink, out, torch.cat([part.lse for part in parts]))
        ctx.kernel, ctx.masks, ctx.cp = kernel, masks, cp
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        masks, cp, dout = ctx.masks, ctx.cp, grads[0]
        keys = _GatheredKeys(k, v, masks.window, cp)
        dq = torch.empty_like(q)
        sums = torch.zeros_like(keys.kv, dtype=accumulation_dtype(q.dtype))
        local = sums.new_empty((2, *sums.shape[1:]))
        transfers = []
        for half, rows in reversed(list(enumerate(halves(q.shape[0])))):
            half_k, half_v = keys.needed(half)
            mask = masks.between(*keys.positions(half))
            dq[rows], dk, dv = ctx.kernel.backward(
                dout[rows], q[rows], half_k, half_v, out[rows], lse[rows], mask
            )
            total = keys.select(sums, half)
            total[:, :, 0] += dk
            total[:, :, 1] += dv
            half_sums = sums[cp.size :].flip(0) if half else sums[: cp.size]
            transfers.append(begin_reduce_scatter_into(local[half : half + 1], half_sums, cp.group))
        for transfer in transfers:
            transfer.wait()
        dk, dv = local.flatten(0, 1).unbind(2)
        dsink = sink_gradient(dout, out, lse, sink) if ctx.needs_input_grad[3] else None
        return dq, dk.to(k.dtype), dv.to(v.dtype), dsink, None, None, None


class _GatheredKeys:
    """All-gather of keys and values in flight, and the range of them that each of a rank's two chunks needs.

    Attributes:
        kv: [2 cp chunks, rows, b, 2, g, d], valid after `needed`.
    """

    def __init__(self, k: Tensor, v: Tensor, window: int | None, cp: ContextParallel) -> None:
        self.window, self.cp = window, cp
        self.chunks = cp.chunks(k.shape[0])
        local = torch.stack((k, v), dim=2).unflatten(0, (2, -1))
        self.kv = local.new_empty((2 * cp.size, *local.shape[1:]))
        self._second = torch.empty_like(self.kv[: cp.size])
        self._transfers = [
            begin_all_gather_into(target, local[half : half + 1], cp.group)
            for half, target in enumerate((self.kv[: cp.size], self._second))
        ]

    def needed(self, half: int) -> tuple[Tensor, Tensor]:
        """Wait for the keys and values that queries of the first or second chunk need, and return them: [rows, b, g, d]."""
        for transfer in self._transfers[: half + 1]:
            transfer.wait()
        if half and self._transfers:
            self.kv[self.cp.size :] = self._second.flip(0)
            self._transfers = []
        k, v = self.select(self.kv, half).unbind(2)
        return k, v

    def select(self, x: Tensor, half: int) -> Tensor:
        """Return the same rows of a tensor like `kv`: [rows, b, 2, g, d]."""
        _, (keys,) = self.positions(half)
        return x.flatten(0, 1)[keys.start : keys.stop]

    def positions(self, half: int) -> tuple[tuple[range], tuple[range]]:
        """Return the positions of the queries of a chunk, and of the keys that they need."""
        chunk = self.chunks[half]
        return (chunk,), (key_range(chunk, self.window),)
