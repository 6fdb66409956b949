"""Heads for rows, traded over context ranks, for parts whose state runs through a sample: delta nets, Mamba-2.

    rank 0  rows 0 7, heads 0 1 2 3  ─┐                ┌─  rank 0  rows 0 .. 7, heads 0 1
    rank 1  rows 1 6, heads 0 1 2 3  ─┼─ all-to-all  ──┼─  rank 1  rows 0 .. 7, heads 2 3

A rank then computes whole samples: its convolution sees all tokens before a row, its state passes no other rank. Heads that are
fewer than the ranks, such as those of keys, are copied to all ranks that need them.

Source: DeepSpeed Ulysses, arXiv:2309.14509, whose exchange Megatron-LM applies to these layers too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.parallel.context.context_attention import heads_of, rows_of
from megatrain.parallel.context_parallel import ContextParallel
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.tensor_parallel import conjugate


class Heads(NamedTuple):
    """Consecutive channels of a tensor that are heads."""

    num_heads: int
    channels: int
    """Channels of each head."""


class HeadExchange(NamedTuple):
    """The exchange over the context ranks of the current pass; with one rank nothing changes."""

    cp: ContextParallel

    @property
    def group(self) -> RankGroup:
        return self.cp.group

    def local(self, heads: Heads) -> Heads:
        """Return this rank's share of heads."""
        return Heads(max(1, heads.num_heads // self.group.size), heads.channels)

    def share(self, x: Tensor, parts: Sequence[Heads]) -> Tensor:
        """Return the channels of this rank's heads of a weight: [..., channels of all parts] -> [..., those of their local heads]."""
        return x if self.group.size == 1 else self._by_rank(x, parts)[..., self.group.rank, :]

    def to_heads(self, x: Tensor, parts: Sequence[Heads]) -> Tensor:
        """Trade this rank's rows for its heads: [s/c, b, channels of all parts] -> [s, b, those of their local heads]."""
        if self.group.size == 1:
            return x
        return conjugate(self._by_rank(x, parts), self.group, heads_of, rows_of)

    def to_rows(self, x: Tensor) -> Tensor:
        """Trade this rank's heads for its rows: [s, b, n/c, d] -> [s/c, b, n, d]."""
        if self.group.size == 1:
            return x
        return conjugate(x, self.group, rows_of, heads_of).flatten(2, 3)

    def _by_rank(self, x: Tensor, parts: Sequence[Heads]) -> Tensor:
        """Return the channels of each rank: [..., channels] -> [..., c, local channels]."""
        size, found = self.group.size, []
        for part, heads in zip(
            x.split([heads.num_heads * heads.channels for heads in parts], -1), parts, strict=True
        ):
            split = part.unflatten(-1, (heads.num_heads, heads.channels))
            copies = max(1, size // heads.num_heads)
            split = split.repeat_interleave(copies, dim=-2) if copies > 1 else split
            found.append(split.unflatten(-2, (size, -1)).flatten(-2))
        return torch.cat(found, dim=-1)
