"""The rank grid: which ranks work together on what.

    world 8, tp 2, dp 2, pp 2:   pp 0: dp 0: ranks 0 1 | dp 1: ranks 2 3      tp groups 01 23 45 67
                                 pp 1: dp 0: ranks 4 5 | dp 1: ranks 6 7      dp 02 13 46 57, pp 04 15 26 37

`GridShape` computes rank lists and needs no processes; `RankGrid` holds the groups that one rank is in. Ranks are
numbered as Megatron-LM numbers them: the axis that comes first in `order` varies fastest. Experts have a
factorisation of their own of the same ranks, with the same pipelines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
STAGES_BEFORE_REPLICAS = "tp-cp-ep-pp-dp"
"""The order of --use-tp-pp-dp-mapping: neighbours in a pipeline are closer than replicas."""


@dataclass(frozen=True, kw_only=True)
class GridShape:
    """Sizes of the axes. The dense grid has ep 1; the expert grid has cp 1, and its own tp and dp."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    kv_copies: int = 1
    """How many neighbours among the tensor ranks hold the same keys and values, where query groups are fewer than they."""
    order: str = DEFAULT_ORDER
    dp_copies: int = 1
    """Into how many runs of neighbours the ranks of a dp group are cut, each of which holds all optimizer state."""

    has_matrices: bool = False
    """Whether whole matrices are put together of their shards, as by Muon."""

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.ep * self.dp * self.pp

    def experts(self, *, ep: int, etp: int) -> GridShape:
        """How experts divide these ranks: `ep` ranks with different experts, `etp` that share each of them.

        Raises:
            ValueError: the ranks cannot be divided so, or pipelines would run over other ranks than these.
        """
        per_replica = etp * ep * self.pp
        if self.world_size % per_replica:
            raise ValueError(f"{self.world_size} ranks do not divide into {per_replica} = etp * ep * pp")
        shape = GridShape(tp=etp, ep=ep, dp=self.world_size // per_replica, pp=self.pp, order=self.order)
        if shape.rank_lists("pp") != self.rank_lists("pp"):
            raise ValueError(
                f"with the order {self.order}, experts would have other pipelines than dense layers"
            )
        return shape

    def rank_lists(self, axes: str) -> list[list[int]]:
        """Groups whose members vary over `axes` ("tp", "dp-cp"), in the order of `order`, fastest axis first."""
        names = self.order.split("-")
        varying = set(axes.split("-"))
        assert varying <= set(names), f"{axes} is not made of {names}"
        ranks = np.arange(self.world_size).reshape([getattr(self, name) for name in reversed(names)])
        places = {name: len(names) - 1 - place for place, name in enumerate(names)}
        slow_to_fast = [n for n in reversed(names) if n not in varying] + [
            n for n in reversed(names) if n in varying
        ]
        members = int(np.prod([getattr(self, name) for name in varying]))
        lists: list[list[int]] = (
            ranks.transpose([places[name] for name in slow_to_fast]).reshape(-1, members).tolist()
        )
        return lists

    def kv_lists(self) -> list[list[int]]:
        """Tensor ranks that hold the same keys and values."""
        size = self.kv_copies
        assert self.tp % size == 0, f"{self.tp} tensor ranks do not split into groups of {size}"
        return [ranks[i : i + size] for ranks in self.rank_lists("tp") for i in range(0, self.tp, size)]

    def shard_lists(self) -> list[list[int]]:
        """Neighbours along dp over which optimizer state is spread (Megatron-LM's optimizer instances)."""
        size = self.dp // self.dp_copies
        return [
            ranks[first : first + size]
            for ranks in self.rank_lists("dp")
            for first in range(0, self.dp, size)
        ]

    def copies_lists(self) -> list[list[int]]:
        """Ranks along dp that hold the same shard."""
        size = self.dp // self.dp_copies
        return [ranks[place::size] for ranks in self.rank_lists("dp") for place in range(size)]

    def matrix_lists(self) -> list[list[int]]:
        """Ranks that hold the optimizer state of a model chunk together: of tp, times those of a run of `shard_lists`."""
        if not self.has_matrices:
            return []
        size = self.tp * self.dp // self.dp_copies
        return [
            ranks[first : first + size]
            for ranks in self.rank_lists("tp-dp")  # tp varies fastest
            for first in range(0, len(ranks), size)
        ]

    def embedding_lists(self) -> list[list[int]]:
        """First and last stage of each pipeline: the ranks that share a tied embedding."""
        return [[ranks[0], ranks[-1]] if len(ranks) > 1 else ranks for ranks in self.rank_lists("pp")]


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


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """The groups of one rank, one for each axis and combination that something here reduces or sends over."""

    shape: GridShape
    rank: int
    world: RankGroup
    messages: RankGroup
    """The same ranks as `world`, for text, by way of CPUs: who waits here for a slow disk delays no collective."""
    tp: RankGroup
    kv: RankGroup
    """Ranks of `tp` that hold the same keys and values; this rank alone, where each has its own."""
    dp: RankGroup
    dp_shard: RankGroup
    """The part of `dp` over which optimizer state is spread: all of it, neighbours, or this rank alone."""
    dp_copies: RankGroup
    """The ranks of `dp` that hold the same shard as this one."""
    matrix: RankGroup
    """Ranks of `tp` and `dp_shard` together; this rank alone, where nobody asks for whole matrices."""
    pp: RankGroup
    pp_backward: RankGroup
    """The same ranks as `pp`: gradients travel on a channel of their own, so that neither direction waits for the other."""
    tp_pp: RankGroup
    embedding: RankGroup
    """First and last stage; this rank alone, where it is neither or there is one stage."""

    @classmethod
    def build(
        cls,
        shape: GridShape,
        rank: int,
        make_handle: Callable[[str, Sequence[Sequence[int]]], Any] | None = None,
    ) -> RankGrid:
        """Make all groups, on every rank in the same order.

        `make_handle` gets a name and the rank lists of that name, and makes the list that this rank is in.
        """
        lists = {
            "world": [list(range(shape.world_size))],
            "messages": [list(range(shape.world_size))],
            "tp": shape.rank_lists("tp"),
            "kv": shape.kv_lists(),
            "dp": shape.rank_lists("dp"),
            "pp": shape.rank_lists("pp"),
            "pp_backward": shape.rank_lists("pp"),
            "tp_pp": shape.rank_lists("tp-pp"),
            "embedding": shape.embedding_lists(),
        }
        groups = {name: _own_group(name, rank_lists, rank, make_handle) for name, rank_lists in lists.items()}
        late = {
            "dp_shard": shape.shard_lists(),
            "dp_copies": shape.copies_lists(),
            "matrix": shape.matrix_lists(),
        }
        for name, rank_lists in late.items():
            same = next((other for other in ("dp", "tp") if rank_lists == lists[other]), None)
            groups[name] = (
                _own_group(name, rank_lists, rank, make_handle)
                if same is None
                else dataclasses.replace(groups[same], name=name)  # they share one channel
            )
        return cls(shape=shape, rank=rank, **groups)

    def is_first_of(self, names: Sequence[str]) -> bool:
        """Whether this rank comes first in all of these groups: the one that counts and writes what they all hold."""
        return all(self.group(name).is_first for name in names)

    def group(self, name: str) -> RankGroup:
        """The group of that name, as parameter layouts refer to it."""
        found: RankGroup = getattr(self, name)
        return found


def _own_group(
    name: str,
    rank_lists: Sequence[Sequence[int]],
    rank: int,
    make_handle: Callable[[str, Sequence[Sequence[int]]], Any] | None,
) -> RankGroup:
    """Lists of one rank need no handle; a rank that is in no list is a group by itself."""
    lists = [ranks for ranks in rank_lists if len(ranks) > 1]
    handle = make_handle(name, lists) if make_handle is not None and lists else None
    own = next((ranks for ranks in lists if rank in ranks), None)
    return (
        RankGroup(name, (rank,), 0) if own is None else RankGroup(name, tuple(own), own.index(rank), handle)
    )
