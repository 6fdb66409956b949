"""Attention of some heads to the whole samples: rows of all heads are exchanged for all rows of some (`--cp-comm-type a2a`).

    rank 0  rows 0 7, heads 0 1 2 3  ─┐                ┌─  rank 0  rows 0 .. 7, heads 0
    rank 1  rows 1 6, heads 0 1 2 3  ─┼─ all-to-all  ──┼─  rank 1  rows 0 .. 7, heads 1
    ...                              ─┘                └─  ...

Where the group is a part of the context ranks, its ranks hold neighbouring chunks: together these are the two larger
chunks of a rank of the ring between groups (`a2a+p2p`).

Source: DeepSpeed Ulysses, arXiv:2309.14509; USP, arXiv:2405.07719, for the two levels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.parallel.collectives import begin_all_to_all_into
from megatrain.parallel.context import by_rank, in_order
from megatrain.parallel.grid import RankGroup


def to_heads(q: Tensor, k: Tensor, v: Tensor, group: RankGroup) -> tuple[Tensor, Tensor, Tensor]:
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


def to_rows(out: Tensor, group: RankGroup) -> Tensor:
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
    return in_order(_exchanged(x.movedim(2, 0), group).flatten(0, 1), group.size)


def _rows(x: Tensor, group: RankGroup) -> Tensor:
    """[s, b, heads/c, d] -> [s/c, b, c, heads/c, d]."""
    return _exchanged(by_rank(x, group.size).unflatten(0, (group.size, -1)), group).movedim(0, 2)


def _exchanged(x: Tensor, group: RankGroup) -> Tensor:
    """[c, ...]: row i of rank j becomes row j of rank i."""
    x = x.contiguous()
    out = torch.empty_like(x)
    begin_all_to_all_into(out, x, group).wait()
    return out
