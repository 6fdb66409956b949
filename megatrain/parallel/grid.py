"""The rank grid: the groups that one rank communicates in, one per parallel axis and combination of axes.

    world 8, tp 2, dp 2, pp 2:   rank 6 has   tp 6 7   dp 4 6   pp 2 6   replicas 4 6   embedding 2 6

`rank_lists.py` computes which ranks form a group, `build_grid.py` builds the groups. Ranks of dp read different samples,
ranks of cp share a sample's sequence: together they are the replicas, over which gradients are summed and optimizer
state is sharded. Expert parameters have groups of their own over the same ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatrain.parallel.messages import Messages
from megatrain.parallel.rank_lists import Family, GridShape


@dataclass(frozen=True)
class RankGroup:
    """Ranks that communicate, as seen by one of them."""

    name: str
    ranks: tuple[int, ...]
    rank: int
    """Index of this rank in `ranks`."""
    handle: Any = None
    """Process group of torch.distributed; None for one rank, and where nothing is sent, as in a dry run."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True)
class Channel:
    """Messages from one pipeline rank to another: hidden states if `is_forward`, else their gradients."""

    sender: int
    receiver: int
    is_forward: bool


@dataclass(frozen=True)
class FamilyGroups:
    """The ranks that hold a family's parameters and their optimizer state, as seen by one of them."""

    replicas: RankGroup
    """Ranks with the same weights; gradients are summed over them."""
    shard: RankGroup
    """Ranks of `replicas` over which optimizer state is sharded: all of them, an instance, or this rank alone."""
    copies: RankGroup
    """Ranks of `replicas` with the same shard as this rank."""
    matrix: RankGroup
    """Product of the sizes of `shard` and of the groups that split matrices; this rank alone unless an optimizer needs whole matrices."""


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """All groups of one rank."""

    shape: GridShape
    rank: int
    world: RankGroup
    messages: Messages
    """JSON values between all ranks; waiting there for a slow disk delays no collective."""
    pp: RankGroup
    channels: Mapping[Channel, RankGroup]
    """A communicator for each pair of ranks with adjacent virtual stages and each direction, so that none waits for another."""
    embedding: RankGroup
    """First and last rank of `pp`; this rank alone if it is neither, or if they are the same."""
    tp: RankGroup
    kv: RankGroup
    """Ranks of `tp` with the same keys and values; this rank alone if each has its own."""
    cp: RankGroup
    """Ranks that share the sequence of a sample."""
    cp_heads: RankGroup
    """Consecutive ranks of `cp` that exchange heads under a two-level cp_comm_type; else this rank alone."""
    cp_ring: RankGroup
    """Ranks of `cp` with the same index in their `cp_heads` groups; else this rank alone."""
    contexts: tuple[RankGroup, ...] = ()
    """Ranks of `replicas` that may share a pack of documents: a group of each size, ascending."""
    tp_cp: RankGroup
    """Ranks of a stage that process the same micro-batch."""
    etp: RankGroup
    """Ranks that share each expert; `tp` without experts."""
    ep: RankGroup
    """Ranks with different experts."""
    ep_host: RankGroup
    """Ranks of `ep` that forward tokens to one another, on one host; this rank alone if tokens are not forwarded."""
    ep_peers: RankGroup
    """Ranks of `ep` with the same index in their `ep_host` groups; else this rank alone."""
    dp: RankGroup
    """Ranks that read different samples."""
    replicas: RankGroup
    """Ranks of `dp` and `cp`: they hold the same dense weights."""
    dp_shard: RankGroup
    """Ranks of `replicas` over which dense optimizer state is sharded."""
    dp_copies: RankGroup
    """Ranks of `replicas` with the same shard as this rank."""
    expert_replicas: RankGroup
    """Ranks with the same experts; `replicas` without experts."""
    expert_shard: RankGroup
    expert_copies: RankGroup
    matrix: RankGroup
    """Ranks of `tp` and `dp_shard` together; this rank alone unless an optimizer needs whole matrices."""
    expert_matrix: RankGroup

    @property
    def ep_steps(self) -> tuple[RankGroup, ...]:
        """The groups that a token crosses in turn to the ranks of its experts."""
        return (self.ep,) if 1 in (self.ep_host.size, self.ep_peers.size) else (self.ep_peers, self.ep_host)

    def family(self, family: Family) -> FamilyGroups:
        """Return the groups of a family of parameters."""
        if family == "dense":
            return FamilyGroups(self.replicas, self.dp_shard, self.dp_copies, self.matrix)
        return FamilyGroups(self.expert_replicas, self.expert_shard, self.expert_copies, self.expert_matrix)

    def owns(self, copies: Sequence[str], family: Family) -> bool:
        """Return whether this rank counts its shard of a box: it is the first rank that holds it.

        Args:
            copies: names of groups whose ranks hold the same box, besides the family's replicas.
        """
        return self.family(family).copies.is_first and self.is_first_of(copies)

    def index_in(self, names: Sequence[str]) -> tuple[int, int]:
        """Return the index of this rank in the product of these groups, and the size of the product."""
        index, size = 0, 1
        for group in map(self.group, names):
            index, size = index * group.size + group.rank, size * group.size
        return index, size

    def is_first_of(self, names: Sequence[str]) -> bool:
        """Return whether this rank is the first of all these groups."""
        return all(self.group(name).is_first for name in names)

    def group(self, name: str) -> RankGroup:
        """Return a group by the name that parameter layouts use."""
        return getattr(self, name)  # type: ignore[no-any-return]
