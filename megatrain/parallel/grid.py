"""The rank grid: which ranks work together on what.

    world 8, tp 2, dp 2, pp 2:   pp 0: dp 0: ranks 0 1 | dp 1: ranks 2 3      tp groups 01 23 45 67
                                 pp 1: dp 0: ranks 4 5 | dp 1: ranks 6 7      dp 02 13 46 57, pp 04 15 26 37
    its experts with ep 4, etp 1:       experts' ranks 0 1 2 3 | 4 5 6 7      ep 0123 4567, expert replicas: each alone

`GridShape` computes rank lists and needs no processes; `RankGrid` holds the groups that one rank is in. Ranks are
numbered as Megatron-LM numbers them: the axis that comes first in `order` varies fastest. Experts have a
factorisation of their own of the same ranks, with the same pipelines. Ranks of dp read different samples, ranks of cp
share a sample's sequence: together they are the replicas, over which gradients are summed and state is spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatrain.parallel.messages import Messages
from megatrain.parallel.rank_lists import Family, GridShape


@dataclass(frozen=True)
class RankGroup:
    """Ranks that communicate, seen from one of them. `handle` is None at size one, where nothing is sent."""

    name: str
    ranks: tuple[int, ...]
    rank: int
    """Place of this rank in `ranks`."""
    handle: Any = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


@dataclass(frozen=True)
class FamilyGroups:
    """Where the parameters of a family and their optimizer state lie, seen from one rank."""

    replicas: RankGroup
    """Ranks that hold the same weights, over which gradients are summed."""
    shard: RankGroup
    """The part of the replicas over which optimizer state is spread: all of them, neighbours, or this rank alone."""
    copies: RankGroup
    """The replicas that hold the same shard as this rank."""
    matrix: RankGroup
    """The ranks of `shard`, times those that split matrices; this rank alone, where nobody asks for whole matrices."""


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """The groups of one rank, one for each axis and combination that something here reduces or sends over."""

    shape: GridShape
    rank: int
    world: RankGroup
    messages: Messages
    """Between all ranks, for words: who waits here for a slow disk delays no collective."""
    pp: RankGroup
    pp_backward: RankGroup
    """The same ranks as `pp`: gradients travel on a channel of their own, so that neither direction waits for the other."""
    embedding: RankGroup
    """First and last stage; this rank alone, where it is neither or there is one stage."""
    tp: RankGroup
    kv: RankGroup
    """Ranks of `tp` that hold the same keys and values; this rank alone, where each has its own."""
    cp: RankGroup
    """Ranks that share the sequence of a sample."""
    cp_heads: RankGroup
    """Neighbours of `cp` that exchange heads where context ranks have two levels; this rank alone, where they do not."""
    cp_ring: RankGroup
    """The ranks of `cp` that have the same place among their neighbours; likewise."""
    tp_cp: RankGroup
    """Ranks of a stage that work on the same micro-batch."""
    etp: RankGroup
    """Ranks that share each expert; `tp`, where there are no experts."""
    ep: RankGroup
    """Ranks with different experts."""
    ep_etp: RankGroup
    """Ranks that hold all experts of a stage together."""
    dp: RankGroup
    """Ranks that read different samples."""
    replicas: RankGroup
    """Ranks of `dp` and `cp`: they hold the same dense weights, and sum their gradients."""
    dp_shard: RankGroup
    """The part of `replicas` over which optimizer state is spread: all of them, neighbours, or this rank alone."""
    dp_copies: RankGroup
    """The ranks of `replicas` that hold the same shard as this one."""
    expert_replicas: RankGroup
    """Ranks that hold the same experts; `replicas`, where there are none."""
    expert_shard: RankGroup
    expert_copies: RankGroup
    matrix: RankGroup
    """Ranks of `tp` and `dp_shard` together; this rank alone, where nobody asks for whole matrices."""
    expert_matrix: RankGroup

    def family(self, family: Family) -> FamilyGroups:
        """Where the parameters of a family lie."""
        if family == "dense":
            return FamilyGroups(self.replicas, self.dp_shard, self.dp_copies, self.matrix)
        return FamilyGroups(self.expert_replicas, self.expert_shard, self.expert_copies, self.expert_matrix)

    def owns(self, copies: Sequence[str], family: Family) -> bool:
        """Whether this rank counts and writes what it has the shard of: it is the first that holds it.

        `copies` are names of groups whose ranks hold the same box, besides the family's replicas.
        """
        return self.family(family).copies.is_first and self.is_first_of(copies)

    def is_first_of(self, names: Sequence[str]) -> bool:
        """Whether this rank comes first in all of these groups."""
        return all(self.group(name).is_first for name in names)

    def group(self, name: str) -> RankGroup:
        """The group of that name, as parameter layouts refer to it."""
        found: RankGroup = getattr(self, name)
        return found
