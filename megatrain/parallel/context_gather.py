"""Attention to keys and values that are gathered from all ranks (`--cp-comm-type all_gather`).

    chunks 0 .. cp-1   the ranks' first chunks, gathered in order        queries of the first chunk need no more
    cp .. 2 cp - 1     their second chunks, which come last rank first   gathered while those are computed

Each of a rank's two chunks attends causally to the run of keys that ends with its own: windows and documents are plain
cases of variable length, and no kernel needs a mask. The backward pass gathers once more, and sums gradients of keys
and values where they belong, those of second chunks while first ones are computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.attention.blocks import AttentionKernel, Joined, sink_gradient
from megatrain.kernels.dtypes import wide
from megatrain.parallel.collectives import begin_all_gather_into, begin_reduce_scatter_into
from megatrain.parallel.context import ContextParallel
from megatrain.parallel.context_views import Views


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    kernel: AttentionKernel,
    views: Views,
    cp: ContextParallel,
) -> Tensor:
    """As `context_ring.ring_attention`, for any window and any documents."""
    out: Tensor = _Gathered.apply(q, k, v, sink, kernel, views, cp)
    return out


class _Gathered(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        kernel: AttentionKernel,
        views: Views,
        cp: ContextParallel,
    ) -> Tensor:
        parts = []
        keys = _Keys(k, v, views.window, cp)
        for half, rows in enumerate(_halves(q)):
            own_k, own_v = keys.run(half)
            parts.append(Joined(*kernel.forward(q[rows], own_k, own_v, views.between(*keys.places(half)))))
            if sink is not None:
                parts[-1].add_sink(sink)
        out = torch.cat([part.out for part in parts]).to(q.dtype)
        ctx.save_for_backward(q, k, v, sink, out, torch.cat([part.lse for part in parts]))
        ctx.kernel, ctx.views, ctx.cp = kernel, views, cp
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        views, cp, dout = ctx.views, ctx.cp, grads[0]
        keys = _Keys(k, v, views.window, cp)
        dq = torch.empty_like(q)
        sums = torch.zeros_like(keys.whole, dtype=wide(q.dtype))
        own = sums.new_empty((2, *sums.shape[1:]))
        halves = list(enumerate(_halves(q)))
        transfers = []
        for half, rows in reversed(halves):
            own_k, own_v = keys.run(half)
            dq[rows], dk, dv = ctx.kernel.backward(
                dout[rows], q[rows], own_k, own_v, out[rows], lse[rows], views.between(*keys.places(half))
            )
            total = keys.part(sums, half)
            total[:, :, 0] += dk
            total[:, :, 1] += dv
            own_sums = sums[cp.size :].flip(0) if half else sums[: cp.size]
            transfers.append(begin_reduce_scatter_into(own[half : half + 1], own_sums, cp.group))
        for transfer in transfers:
            transfer.wait()
        dk, dv = own.flatten(0, 1).unbind(2)
        dsink = sink_gradient(dout, out, lse, sink) if ctx.needs_input_grad[3] else None
        return dq, dk.to(k.dtype), dv.to(v.dtype), dsink, None, None, None


class _Keys:
    """Keys and values on their way, and which of them each of a rank's two chunks needs.

    Attributes:
        whole: [2 cp chunks, rows, b, 2, g, d], as far as they have come.
    """

    def __init__(self, k: Tensor, v: Tensor, window: int | None, cp: ContextParallel) -> None:
        self.window, self.cp = window, cp
        self.chunks = cp.chunks(k.shape[0])
        kv = torch.stack((k, v), dim=2).unflatten(0, (2, -1))
        self.whole = kv.new_empty((2 * cp.size, *kv.shape[1:]))
        self._late = torch.empty_like(self.whole[: cp.size])
        self._transfers = [
            begin_all_gather_into(target, kv[half : half + 1], cp.group)
            for half, target in enumerate((self.whole[: cp.size], self._late))
        ]

    def run(self, half: int) -> tuple[Tensor, Tensor]:
        """Keys and values that the queries of the first or second chunk need, [rows, b, g, d]."""
        for transfer in self._transfers[: half + 1]:
            transfer.wait()
        if half and self._transfers:
            self.whole[self.cp.size :] = self._late.flip(0)
            self._transfers = []
        k, v = self.part(self.whole, half).unbind(2)
        return k, v

    def part(self, x: Tensor, half: int) -> Tensor:
        """The rows of that run, of a tensor like `whole`: [rows, b, 2, g, d]."""
        _, (seen,) = self.places(half)
        return x.flatten(0, 1)[seen.start : seen.stop]

    def places(self, half: int) -> tuple[tuple[range], tuple[range]]:
        """Of the queries of the first or second chunk, and of the run of keys that ends with theirs."""
        chunk = self.chunks[half]
        first = 0 if self.window is None else max(0, chunk.start - self.window)
        return (chunk,), (range(first, chunk.stop),)


def _halves(q: Tensor) -> tuple[slice, slice]:
    """Rows of a rank's first chunk and of its second."""
    middle = q.shape[0] // 2
    return slice(middle), slice(middle, None)
