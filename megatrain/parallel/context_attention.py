"""How attention reaches across context ranks: `--cp-comm-type`.

p2p          keys and values travel around a ring of all of them      context_ring.py
all_gather   they are gathered from all of them                       context_gather.py
a2a          each rank has all rows of some heads                     context_heads.py
a2a+p2p      in groups of neighbours; keys and values travel between these groups
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.attention.interface import (
    AttentionKernel,
    CuSeqlens,
    MaskSpec,
    SoftmaxMerge,
    sink_gradient,
)
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.parallel.batch import Documents
from megatrain.parallel.collectives import (
    Transfer,
    begin_all_gather_into,
    begin_all_to_all_into,
    begin_reduce_scatter_into,
    begin_ring_shift,
)
from megatrain.parallel.context_parallel import ContextParallel, to_rank_order, to_sequence_order
from megatrain.parallel.grid import RankGrid, RankGroup


@dataclass(frozen=True, kw_only=True)
class BlockMasks:
    """Of one pass through one layer."""

    device: torch.device
    needs_explicit_mask: bool
    """Of the kernel."""
    window: int | None = None
    documents: Documents | None = None
    """Of the whole samples."""
    keep_fn: Callable[[Tensor, Tensor], Tensor] | None = None
    """Which probabilities dropout keep_fn, by the places of queries and of keys: bool [b, n, sq, sk]."""

    def between(self, queries: Sequence[range], keys: Sequence[range]) -> MaskSpec:
        """Of queries at some places beside keys at the same ones, at earlier ones, or in a run that ends with theirs."""
        is_causal = keys[-1].stop == queries[-1].stop
        assert is_causal or keys[-1].stop <= queries[0].start, (
            f"no block of queries at {queries}, keys at {keys}"
        )
        kept = None if self.keep_fn is None else self.keep_fn(self._places(queries), self._places(keys))
        has_rules = self.window is not None or self.documents is not None
        is_square = tuple(queries) == tuple(keys)
        if self.needs_explicit_mask and (has_rules or (is_causal and not is_square)):
            return MaskSpec(explicit=self._mask(self._places(queries), self._places(keys)), dropout_mask=kept)
        if not has_rules:
            return MaskSpec(is_causal=is_causal, dropout_mask=kept)
        assert is_causal, "kernels without masks take windows and documents in runs of keys"
        assert len(queries) == len(keys) == 1, f"places {queries} and {keys} are no runs"
        return MaskSpec(
            is_causal=True,
            window=self.window,
            cu_seqlens=self._borders(queries[0], keys[0]),
            dropout_mask=kept,
        )

    def _places(self, runs: Sequence[range]) -> Tensor:
        return torch.cat([torch.arange(run.start, run.stop, device=self.device) for run in runs])

    def _mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """True where a query sees a key, by their places: bool [b or 1, 1, sq, sk]."""
        distance = queries.unsqueeze(-1) - keys
        mask = distance >= 0
        if self.window is not None:
            mask &= distance <= self.window
        if self.documents is None:
            return mask[None, None]
        numbers = self.documents.numbers
        is_same = numbers[:, queries].unsqueeze(-1) == numbers[:, keys].unsqueeze(-2)
        return (mask & is_same).unsqueeze(1)

    def _borders(self, queries: range, keys: range) -> CuSeqlens | None:
        """Of what documents have at these places."""
        if self.documents is None:
            return None
        longest = [min(self.documents.max_seqlen, len(run)) for run in (queries, keys)]
        return CuSeqlens(self.documents.within(queries), self.documents.within(keys), longest[0], longest[1])


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    kernel: AttentionKernel,
    masks: BlockMasks,
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
    out: Tensor = _Ring.apply(q, k, v, sink, kernel, masks, cp)
    return out


@dataclass(frozen=True)
class _Block:
    """What a step computes: which rows of a rank's queries see which rows of the keys that came."""

    queries: slice
    keys: slice
    mask: MaskSpec


class _Ring(Function):
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
        joined: SoftmaxMerge | None = None
        for step in range(cp.size):
            coming, transfer = _begin_next(kv, cp.group, is_last=step == cp.size - 1)
            block = _block(step, q.shape[0], masks, cp)
            found = kernel.forward(q[block.queries], kv[0, block.keys], kv[1, block.keys], block.mask)
            if joined is None:
                joined = SoftmaxMerge(*found)
            else:
                joined.add(*found, rows=block.queries)
            transfer.wait()
            kv = coming
        assert joined is not None
        if sink is not None:
            joined.add_sink(sink)
        out = joined.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sink, out, joined.lse)
        ctx.kernel, ctx.masks, ctx.cp = kernel, masks, cp
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        masks, cp, dout = ctx.masks, ctx.cp, grads[0]
        dq = torch.zeros_like(q, dtype=accumulation_dtype(q.dtype))

        def gradients(step: int, kv: Tensor, sums: Tensor) -> None:
            """Add those of a step's block to `dq` and `sums`."""
            block = _block(step, q.shape[0], masks, cp)
            rows, keys = block.queries, block.keys
            found = ctx.kernel.backward(
                dout[rows], q[rows], kv[0, keys], kv[1, keys], out[rows], lse[rows], block.mask
            )
            for total, part in zip((dq[rows], sums[0, keys], sums[1, keys]), found, strict=True):
                total += part

        own = kv = torch.stack((k, v))
        sums = returned = torch.zeros_like(kv, dtype=accumulation_dtype(kv.dtype))
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
    return coming, begin_ring_shift(kv, coming, group)


def _hand_on(sums: Tensor, group: RankGroup) -> tuple[Tensor, Transfer]:
    """Begin to send the sums of gradients after their keys and values, and to take those that come."""
    returned = torch.empty_like(sums)
    return returned, begin_ring_shift(sums, returned, group)


def _block(step: int, rows: int, masks: BlockMasks, cp: ContextParallel) -> _Block:
    """`step`: how many ranks on the keys have come. `rows`: of each rank."""
    whole, first, second = slice(None), slice(rows // 2), slice(rows // 2, None)
    if step == 0:
        own = cp.chunks(rows) if cp.size > 1 else cp.position_ranges(rows)
        return _Block(whole, whole, masks.between(own, own))
    source = (cp.rank - step) % cp.size
    own, theirs = cp.chunks(rows), cp.chunks(rows, source)
    if source < cp.rank:
        return _Block(whole, first, masks.between(own, theirs[:1]))
    return _Block(second, whole, masks.between(own[1:], theirs))


def all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    kernel: AttentionKernel,
    masks: BlockMasks,
    cp: ContextParallel,
) -> Tensor:
    """As `context_ring.ring_attention`, for any window and any documents."""
    out: Tensor = _Gathered.apply(q, k, v, sink, kernel, masks, cp)
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
        masks: BlockMasks,
        cp: ContextParallel,
    ) -> Tensor:
        parts = []
        keys = _Keys(k, v, masks.window, cp)
        for half, rows in enumerate(_halves(q)):
            own_k, own_v = keys.run(half)
            parts.append(
                SoftmaxMerge(*kernel.forward(q[rows], own_k, own_v, masks.between(*keys.places(half))))
            )
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
        keys = _Keys(k, v, masks.window, cp)
        dq = torch.empty_like(q)
        sums = torch.zeros_like(keys.whole, dtype=accumulation_dtype(q.dtype))
        own = sums.new_empty((2, *sums.shape[1:]))
        halves = list(enumerate(_halves(q)))
        transfers = []
        for half, rows in reversed(halves):
            own_k, own_v = keys.run(half)
            dq[rows], dk, dv = ctx.kernel.backward(
                dout[rows], q[rows], own_k, own_v, out[rows], lse[rows], masks.between(*keys.places(half))
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


def sequence_to_heads(q: Tensor, k: Tensor, v: Tensor, group: RankGroup) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's heads of the rows of the group, in order: [s/c, b, heads, d] -> [s, b, heads/c, d], c ranks in the group.

    Keys and values of fewer heads than ranks are copied first, so that each rank has those that its queries need.
    """
    if group.size == 1:
        return q, k, v
    copies = max(1, group.size // k.shape[2])
    k, v = (x.repeat_interleave(copies, dim=2) if copies > 1 else x for x in (k, v))
    shares = [x.unflatten(2, (group.size, -1)) for x in (q, k, v)]  # [s/c, b, c, heads/c, d]
    out: Tensor = _ToHeads.apply(torch.cat(shares, dim=3), group)
    own_q, own_k, own_v = out.split([x.shape[3] for x in shares], dim=2)
    return own_q, own_k, own_v


def heads_to_sequence(out: Tensor, group: RankGroup) -> Tensor:
    """Back to this rank's rows of all heads: [s, b, n/c, d] -> [s/c, b, n, d]."""
    if group.size == 1:
        return out
    rows: Tensor = _ToRows.apply(out, group)
    return rows.flatten(2, 3)


class _ToHeads(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup) -> Tensor:
        ctx.group = group
        return _heads(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _rows(grads[0], ctx.group), None


class _ToRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup) -> Tensor:
        ctx.group = group
        return _rows(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _heads(grads[0], ctx.group), None


def _heads(x: Tensor, group: RankGroup) -> Tensor:
    """[s/c, b, c, heads/c, d] -> [s, b, heads/c, d]."""
    return to_sequence_order(_exchanged(x.movedim(2, 0), group).flatten(0, 1), group.size)


def _rows(x: Tensor, group: RankGroup) -> Tensor:
    """[s, b, heads/c, d] -> [s/c, b, c, heads/c, d]."""
    return _exchanged(to_rank_order(x, group.size).unflatten(0, (group.size, -1)), group).movedim(0, 2)


def _exchanged(x: Tensor, group: RankGroup) -> Tensor:
    """[c, ...]: row i of rank j becomes row j of rank i."""
    x = x.contiguous()
    out = torch.empty_like(x)
    begin_all_to_all_into(out, x, group).wait()
    return out


@dataclass(frozen=True)
class ContextAttention:
    """The two levels of context ranks; either may be one rank alone."""

    heads: RankGroup
    """Neighbours that exchange rows of all heads for all their rows of some heads."""
    ring: ContextParallel
    """The ranks with the same heads, whose keys and values are brought to each other."""
    gathers: bool = False
    """Whether these are gathered; else they travel around."""

    @classmethod
    def of(cls, way: str, grid: RankGrid) -> ContextAttention:
        """What `way`, as --cp-comm-type names it, means to a rank."""
        alone = RankGroup("alone", (grid.rank,), 0)
        heads, ring = grid.cp_heads, grid.cp_ring
        if "+" not in way:
            heads, ring = (grid.cp, alone) if way == "a2a" else (alone, grid.cp)
        return cls(heads, ContextParallel(ring), gathers="all_gather" in way)

    def sequence_to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`context_heads.sequence_to_heads` over `heads`."""
        return sequence_to_heads(q, k, v, self.heads)

    def heads_to_sequence(self, out: Tensor) -> Tensor:
        """`context_heads.heads_to_sequence` over `heads`."""
        return heads_to_sequence(out, self.heads)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, kernel: AttentionKernel, masks: BlockMasks
    ) -> Tensor:
        """`context_ring.ring_attention`, or `context_gather.all_gather_attention`, over `ring`."""
        attention = all_gather_attention if self.gathers else ring_attention
        return attention(q, k, v, sink, kernel, masks, self.ring)
