"""Attention with keys and values that travel around a ring of ranks (`--cp-comm-type p2p`).

    step 0   own keys                     causal
    step i   those of the rank i before   of an earlier rank: all queries, its first chunk of keys
                                          of a later rank:    queries of the second chunk, all its keys
             while those of step i + 1 are on their way

In the backward pass keys and values travel again, and behind them the sums of their gradients, which every rank adds
to. A rank's own block comes last there, while the sums are on their way home.

Source: Ring Attention, arXiv:2310.01889; Striped Attention, arXiv:2311.09431, for the balance that chunks bring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.attention.blocks import AttentionKernel, Joined, View, sink_gradient
from megatrain.kernels.dtypes import wide
from megatrain.parallel.collectives import Transfer, begin_shift
from megatrain.parallel.context import ContextParallel
from megatrain.parallel.context_views import Views
from megatrain.parallel.grid import RankGroup


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    kernel: AttentionKernel,
    views: Views,
    cp: ContextParallel,
) -> Tensor:
    """Attention of a rank's rows to the whole samples.

    Args:
        q: queries of this rank's two chunks, [s/cp, b, n, d].
        k, v: keys and values of the same rows, [s/cp, b, g, d].
        sink: scores [n] that every query sees besides those of the keys.
    Returns:
        [s/cp, b, n, d].
    """
    out: Tensor = _Ring.apply(q, k, v, sink, kernel, views, cp)
    return out


@dataclass(frozen=True)
class _Block:
    """What a step computes: which rows of a rank's queries see which rows of the keys that came."""

    queries: slice
    keys: slice
    view: View


class _Ring(Function):
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
        kv = torch.stack((k, v))
        joined: Joined | None = None
        for step in range(cp.size):
            coming, transfer = _begin_next(kv, cp.group, is_last=step == cp.size - 1)
            block = _block(step, q.shape[0], views, cp)
            found = kernel.forward(q[block.queries], kv[0, block.keys], kv[1, block.keys], block.view)
            if joined is None:
                joined = Joined(*found)
            else:
                joined.add(*found, rows=block.queries)
            transfer.wait()
            kv = coming
        assert joined is not None
        if sink is not None:
            joined.add_sink(sink)
        out = joined.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sink, out, joined.lse)
        ctx.kernel, ctx.views, ctx.cp = kernel, views, cp
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        views, cp, dout = ctx.views, ctx.cp, grads[0]
        dq = torch.zeros_like(q, dtype=wide(q.dtype))

        def gradients(step: int, kv: Tensor, sums: Tensor) -> None:
            """Add those of a step's block to `dq` and `sums`."""
            block = _block(step, q.shape[0], views, cp)
            rows, keys = block.queries, block.keys
            found = ctx.kernel.backward(
                dout[rows], q[rows], kv[0, keys], kv[1, keys], out[rows], lse[rows], block.view
            )
            for total, part in zip((dq[rows], sums[0, keys], sums[1, keys]), found, strict=True):
                total += part

        own = kv = torch.stack((k, v))
        sums = returned = torch.zeros_like(kv, dtype=wide(kv.dtype))
        coming, transfer = _begin_next(kv, cp.group, is_last=cp.size == 1)
        home = Transfer()
        for step in range(1, cp.size):
            transfer.wait()
            kv = coming
            coming, transfer = _begin_next(kv, cp.group, is_last=step == cp.size - 1)
            fresh = torch.zeros_like(sums)
            gradients(step, kv, fresh)
            home.wait()
            fresh += returned  # zeros at first: the sums of a rank's keys begin with the rank behind it
            returned, home = _hand_on(fresh, cp.group)
        sums = torch.zeros_like(sums)
        gradients(0, own, sums)
        home.wait()
        if cp.size > 1:
            sums += returned
        dsink = sink_gradient(dout, out, lse, sink) if ctx.needs_input_grad[3] else None
        return dq.to(q.dtype), sums[0].to(k.dtype), sums[1].to(v.dtype), dsink, None, None, None


def _begin_next(kv: Tensor, group: RankGroup, *, is_last: bool) -> tuple[Tensor, Transfer]:
    """Begin to hand keys and values on, and to take those of the rank before."""
    if is_last:
        return kv, Transfer()
    coming = torch.empty_like(kv)
    return coming, begin_shift(kv, coming, group)


def _hand_on(sums: Tensor, group: RankGroup) -> tuple[Tensor, Transfer]:
    """Begin to send the sums of gradients after their keys and values, and to take those that come."""
    returned = torch.empty_like(sums)
    return returned, begin_shift(sums, returned, group)


def _block(step: int, rows: int, views: Views, cp: ContextParallel) -> _Block:
    """`step`: how many ranks on the keys have come. `rows`: of each rank."""
    whole, first, second = slice(None), slice(rows // 2), slice(rows // 2, None)
    if step == 0:
        own = cp.chunks(rows) if cp.size > 1 else cp.runs(rows)
        return _Block(whole, whole, views.between(own, own))
    source = (cp.rank - step) % cp.size
    own, theirs = cp.chunks(rows), cp.chunks(rows, source)
    if source < cp.rank:
        return _Block(whole, first, views.between(own, theirs[:1]))
    return _Block(second, whole, views.between(own[1:], theirs))
