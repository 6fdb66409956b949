"""Attention over context-parallel ranks, by `--cp-comm-type`.

    p2p          keys and values are passed around a ring of all ranks
    all_gather   keys and values are all-gathered
    a2a          an all-to-all gives each rank all rows of some heads
    a2a+p2p      a2a within groups of consecutive ranks, a ring between the groups

Shapes: s/cp rows per rank in two chunks (see `context_parallel.py`), n query heads, g key and value heads, d channels.

Sources: Ring Attention, arXiv:2310.01889; Striped Attention, arXiv:2311.09431, for the balance of the chunks; DeepSpeed
Ulysses, arXiv:2309.14509 (a2a); USP, arXiv:2405.07719 (two levels).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.attention.interface import AttentionKernel, MaskSpec, SoftmaxMerge, sink_gradient
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.parallel.collectives import (
    Transfer,
    begin_ring_shift,
    exchange,
)
from megatrain.parallel.context.block_masks import BlockMasks, halves
from megatrain.parallel.context.gathered_attention import AllGatherAttention
from megatrain.parallel.context_parallel import ContextParallel, to_rank_order, to_sequence_order
from megatrain.parallel.grid import RankGrid, RankGroup
from megatrain.parallel.tensor_parallel import conjugate


@dataclass(frozen=True)
class ContextAttention:
    """The two levels of context-parallel attention; either may be one rank."""

    heads: RankGroup
    """Ranks that exchange rows of all heads for all their rows of some heads."""
    ring: ContextParallel
    """Ranks with the same heads, which exchange keys and values."""
    gathers: bool = False
    """All-gather keys and values over `ring` instead of passing them around."""

    @classmethod
    def of(cls, cp_comm_type: str, grid: RankGrid) -> ContextAttention:
        """Return the levels of a --cp-comm-type for a rank."""
        alone = RankGroup("alone", (grid.rank,), 0)
        heads, ring = grid.cp_heads, grid.cp_ring
        if "+" not in cp_comm_type:
            heads, ring = (grid.cp, alone) if cp_comm_type == "a2a" else (alone, grid.cp)
        return cls(heads, ContextParallel(ring), gathers="all_gather" in cp_comm_type)

    def sequence_to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Trade rows of all heads for all rows of some heads: [s/c, b, heads, d] -> [s, b, heads/c, d], c ranks.

            rank 0  rows 0 7, heads 0 1 2 3  ─┐                ┌─  rank 0  rows 0 .. 7, heads 0
            rank 1  rows 1 6, heads 0 1 2 3  ─┼─ all-to-all  ──┼─  rank 1  rows 0 .. 7, heads 1

        Keys and values with fewer heads than ranks are repeated first, so that each rank has the ones of its queries.
        With two levels the consecutive chunks of these ranks form the two larger chunks of a rank of the ring.
        """
        size = self.heads.size
        if size == 1:
            return q, k, v
        copies = max(1, size // k.shape[2])
        k, v = (x.repeat_interleave(copies, dim=2) if copies > 1 else x for x in (k, v))
        parts = [x.unflatten(2, (size, -1)) for x in (q, k, v)]  # [s/c, b, c, heads/c, d]
        out = conjugate(torch.cat(parts, dim=3), self.heads, heads_of, rows_of)
        local_q, local_k, local_v = out.split([x.shape[3] for x in parts], dim=2)
        return local_q, local_k, local_v

    def heads_to_sequence(self, out: Tensor) -> Tensor:
        """Trade all rows of some heads for this rank's rows of all heads: [s, b, n/c, d] -> [s/c, b, n, d]."""
        if self.heads.size == 1:
            return out
        return conjugate(out, self.heads, rows_of, heads_of).flatten(2, 3)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, kernel: AttentionKernel, masks: BlockMasks
    ) -> Tensor:
        """Attend from this rank's rows to the whole samples over `ring`.

        Args:
            q: queries, [s/cp, b, n, d].
            k, v: keys and values of the same rows, [s/cp, b, g, d].
            sink: sink logits [n].
        Returns:
            [s/cp, b, n, d].
        """
        # A pack may be of one rank, which has no others to gather from.
        attention = AllGatherAttention if self.gathers and self.ring.size > 1 else _RingAttention
        out: Tensor = attention.apply(q, k, v, sink, kernel, masks, self.ring)
        return out


class _RingAttention(Function):
    """Attention of a rank's rows to keys and values that are passed around a ring.

        step 0   local keys                    causal
        step i   keys of the rank i before     of an earlier rank: all queries, its first chunk of keys
                                               of a later rank:    queries of the second chunk, all its keys
                 (the keys of step i + 1 are in flight)

    In the backward pass keys and values are passed around again, followed by the sums of their gradients, to which every
    rank adds. Each rank computes its own block last, while the sums return to it.
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
        kv = torch.stack((k, v))
        merge: SoftmaxMerge | None = None
        for step in range(cp.size):
            next_kv, transfer = _begin_next(kv, cp.group, is_last=step == cp.size - 1)
            block = _block(step, q.shape[0], masks, cp)
            found = kernel.forward(q[block.queries], kv[0, block.keys], kv[1, block.keys], block.mask)
            if merge is None:
                merge = SoftmaxMerge(*found)
            else:
                merge.add(*found, rows=block.queries)
            transfer.wait()
            kv = next_kv
        assert merge is not None
        if sink is not None:
            merge.add_sink(sink)
        out = merge.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sink, out, merge.lse)
        ctx.kernel, ctx.masks, ctx.cp = kernel, masks, cp
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        masks, cp, dout = ctx.masks, ctx.cp, grads[0]
        dq = torch.zeros_like(q, dtype=accumulation_dtype(q.dtype))

        def add_gradients(step: int, kv: Tensor, dkv: Tensor) -> None:
            block = _block(step, q.shape[0], masks, cp)
            rows, keys = block.queries, block.keys
            found = ctx.kernel.backward(
                dout[rows], q[rows], kv[0, keys], kv[1, keys], out[rows], lse[rows], block.mask
            )
            for total, part in zip((dq[rows], dkv[0, keys], dkv[1, keys]), found, strict=True):
                total += part

        local = kv = torch.stack((k, v))
        dkv = received = torch.zeros_like(kv, dtype=accumulation_dtype(kv.dtype))
        next_kv, transfer = _begin_next(kv, cp.group, is_last=cp.size == 1)
        sums_transfer = Transfer()
        for step in range(1, cp.size):
            transfer.wait()
            kv = next_kv
            next_kv, transfer = _begin_next(kv, cp.group, is_last=step == cp.size - 1)
            sums = torch.zeros_like(dkv)
            add_gradients(step, kv, sums)
            sums_transfer.wait()
            sums += received  # zeros at first: the sums of a rank's keys begin at the next rank
            received, sums_transfer = _begin_sums(sums, cp.group)
        dkv = torch.zeros_like(dkv)
        add_gradients(0, local, dkv)
        sums_transfer.wait()
        if cp.size > 1:
            dkv += received
        dsink = sink_gradient(dout, out, lse, sink) if ctx.needs_input_grad[3] else None
        return dq.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype), dsink, None, None, None


def _begin_next(kv: Tensor, group: RankGroup, *, is_last: bool) -> tuple[Tensor, Transfer]:
    """Begin to pass keys and values to the next rank, and to receive the ones of the previous rank."""
    if is_last:
        return kv, Transfer()
    next_kv = torch.empty_like(kv)
    return next_kv, begin_ring_shift(kv, next_kv, group)


def _begin_sums(sums: Tensor, group: RankGroup) -> tuple[Tensor, Transfer]:
    """Begin to pass the gradient sums after their keys and values, and to receive the sums of the previous rank."""
    received = torch.empty_like(sums)
    return received, begin_ring_shift(sums, received, group)


@dataclass(frozen=True)
class _Block:
    """The rows of a rank's queries and of the received keys in one step."""

    queries: slice
    keys: slice
    mask: MaskSpec


def _block(step: int, rows: int, masks: BlockMasks, cp: ContextParallel) -> _Block:
    """Return the block of a step, with keys of the rank `step` positions earlier; each rank has `rows` rows."""
    whole, (first, second) = slice(None), halves(rows)
    if step == 0:
        local = cp.chunks(rows) if cp.size > 1 else cp.position_ranges(rows)
        return _Block(whole, whole, masks.between(local, local))
    source = (cp.rank - step) % cp.size
    local, theirs = cp.chunks(rows), cp.chunks(rows, source)
    if source < cp.rank:
        return _Block(whole, first, masks.between(local, theirs[:1]))
    return _Block(second, whole, masks.between(local[1:], theirs))


def heads_of(x: Tensor, group: RankGroup) -> Tensor:
    """[s/c, b, c, heads/c, d] -> [s, b, heads/c, d]."""
    return to_sequence_order(exchange(x.movedim(2, 0), group).flatten(0, 1), group.size)


def rows_of(x: Tensor, group: RankGroup) -> Tensor:
    """[s, b, heads/c, d] -> [s/c, b, c, heads/c, d]."""
    return exchange(to_rank_order(x, group.size).unflatten(0, (group.size, -1)), group).movedim(0, 2)
