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

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from megatrain.parallel.messages import Messages

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
STAGES_BEFORE_REPLICAS = "tp-cp-ep-pp-dp"
"""The order of --use-tp-pp-dp-mapping: neighbours in a pipeline are closer than replicas."""

Family = Literal["dense", "expert"]
"""Which of the two factorisations of the ranks a parameter follows."""

_Lists = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class StateLists:
    """The lists that `FamilyGroups` are made of; a rank that is in no list is alone."""

    replicas: _Lists
    shard: _Lists
    copies: _Lists
    matrix: _Lists


@dataclass(frozen=True, kw_only=True)
class GridShape:
    """Sizes of the axes.

    Raises:
        ValueError: experts cannot divide the ranks so, or their pipelines would run over other ranks than the dense ones.
    """

    tp: int = 1
    cp: int = 1
    cp_heads: int = 1
    """How many neighbours among the context ranks exchange heads, where they have two levels."""
    dp: int = 1
    pp: int = 1
    ep: int = 1
    """Ranks with different experts."""
    etp: int | None = None
    """Ranks that share each expert. None: there are no experts, and what is said of them follows the dense layers."""
    kv_copies: int = 1
    """How many neighbours among the tensor ranks hold the same keys and values, where query groups are fewer than they."""
    order: str = DEFAULT_ORDER
    dp_copies: int = 1
    """Into how many runs of neighbours the replicas are cut, each of which holds all optimizer state."""
    expert_copies: int = 1
    """The same of the replicas of experts."""
    has_matrices: bool = False
    """Whether whole matrices are put together of their shards, as by Muon."""

    def __post_init__(self) -> None:
        if self.etp is None:
            assert self.ep == 1, "without experts nothing is spread over ep"
            return
        if self.world_size % self._per_expert_replica:
            raise ValueError(
                f"{self.world_size} ranks do not divide into {self._per_expert_replica} = etp * ep * pp"
            )
        if self.expert_lists("pp") != self.rank_lists("pp"):
            raise ValueError(
                f"with the order {self.order}, experts would have other pipelines than dense layers"
            )

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def replicas(self) -> int:
        return self.dp * self.cp

    @property
    def has_experts(self) -> bool:
        return self.etp is not None

    @property
    def expert_replicas(self) -> int:
        return self.world_size // self._per_expert_replica if self.has_experts else self.replicas

    @property
    def _per_expert_replica(self) -> int:
        return (self.etp or 1) * self.ep * self.pp

    def rank_lists(self, axes: str) -> list[list[int]]:
        """Groups of dense layers whose members vary over `axes` ("tp", "dp-cp"), in the order of `order`, fastest first."""
        sizes = {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp}
        return _rank_lists(sizes, self.order, axes)

    def expert_lists(self, axes: str) -> list[list[int]]:
        """The same of experts; their axes are "etp", "ep", "edp" (replicas) and "pp"."""
        if self.etp is None:
            names = {"etp": "tp", "edp": "cp-dp"}
            return self.rank_lists("-".join(names.get(name, name) for name in axes.split("-")))
        sizes = {"etp": self.etp, "cp": 1, "ep": self.ep, "edp": self.expert_replicas, "pp": self.pp}
        order = self.order.replace("tp", "etp").replace("dp", "edp")
        return _rank_lists(sizes, order, axes)

    def kv_lists(self) -> list[list[int]]:
        """Tensor ranks that hold the same keys and values."""
        assert self.tp % self.kv_copies == 0, (
            f"{self.tp} tensor ranks do not split into groups of {self.kv_copies}"
        )
        return _runs(self.rank_lists("tp"), self.kv_copies)

    def context_levels(self) -> tuple[_Lists, _Lists]:
        """Neighbours among context ranks that exchange heads, and ranks of the same place among theirs; none without levels."""
        lists, size = self.rank_lists("cp"), self.cp_heads
        if size == 1:
            return [], []
        return _runs(lists, size), [ranks[place::size] for ranks in lists for place in range(size)]

    def state_lists(self, family: Family) -> StateLists:
        """Over which ranks the weights and the state of a family lie."""
        if family == "dense":
            replicas, copies, tp = self.rank_lists("dp-cp"), self.dp_copies, self.tp
        else:
            replicas, copies, tp = self.expert_lists("edp"), self.expert_copies, self.etp or self.tp
        size = len(replicas[0]) // copies
        matrix: _Lists = []
        if self.has_matrices:  # tp varies fastest
            axes = self.rank_lists("tp-cp-dp") if family == "dense" else self.expert_lists("etp-edp")
            matrix = _runs(axes, tp * size)
        return StateLists(
            replicas=replicas,
            shard=_runs(replicas, size),
            copies=[ranks[place::size] for ranks in replicas for place in range(size)] if copies > 1 else [],
            matrix=matrix,
        )

    def embedding_lists(self) -> list[list[int]]:
        """First and last stage of each pipeline: the ranks that share a tied embedding."""
        return [[ranks[0], ranks[-1]] if len(ranks) > 1 else ranks for ranks in self.rank_lists("pp")]


def _rank_lists(sizes: Mapping[str, int], order: str, axes: str) -> _Lists:
    names = order.split("-")
    varying = set(axes.split("-"))
    assert varying <= set(names), f"{axes} is not made of {names}"
    ranks = np.arange(int(np.prod(list(sizes.values())))).reshape([sizes[name] for name in reversed(names)])
    places = {name: len(names) - 1 - place for place, name in enumerate(names)}
    slow_to_fast = [n for n in reversed(names) if n not in varying] + [
        n for n in reversed(names) if n in varying
    ]
    members = int(np.prod([sizes[name] for name in varying]))
    lists: _Lists = ranks.transpose([places[name] for name in slow_to_fast]).reshape(-1, members).tolist()
    return lists


def _runs(lists: _Lists, size: int) -> _Lists:
    """Each list cut into runs of neighbours; those of one rank are left out."""
    if size == 1:
        return []
    if size == len(lists[0]):
        return lists
    return [ranks[first : first + size] for ranks in lists for first in range(0, len(ranks), size)]


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

    @classmethod
    def build(
        cls,
        shape: GridShape,
        rank: int,
        make_handle: Callable[[str, Sequence[Sequence[int]]], Any] | None = None,
    ) -> RankGrid:
        """Make all groups, on every rank in the same order.

        `make_handle` gets a name and the rank lists of that name, and makes the list that this rank is in.
        Groups of the same ranks share a channel where they take turns: but for loads of routers that are balanced
        over all replicas, what layers exchange never waits behind what travels between these meanwhile.
        """
        everyone = [list(range(shape.world_size))]
        maker = _GroupMaker(rank, make_handle)
        dense, expert = shape.state_lists("dense"), shape.state_lists("expert")
        alone = {
            "world": everyone,
            "pp": shape.rank_lists("pp"),
            "pp_backward": shape.rank_lists("pp"),
            "embedding": shape.embedding_lists(),
        }
        heads, rings = shape.context_levels()
        of_layers = {
            "tp": shape.rank_lists("tp"),
            "kv": shape.kv_lists(),
            "cp": shape.rank_lists("cp"),
            "cp_heads": heads,
            "cp_ring": rings,
            "tp_cp": shape.rank_lists("tp-cp"),
            "etp": shape.expert_lists("etp"),
            "ep": shape.expert_lists("ep"),
            "ep_etp": shape.expert_lists("etp-ep"),
        }
        of_replicas = {
            "dp": shape.rank_lists("dp"),
            "replicas": dense.replicas,
            "dp_shard": dense.shard,
            "dp_copies": dense.copies,
            "expert_replicas": expert.replicas,
            "expert_shard": expert.shard,
            "expert_copies": expert.copies,
        }
        of_matrices = {"matrix": dense.matrix, "expert_matrix": expert.matrix}
        groups = {name: maker.make(name, lists) for name, lists in alone.items()}
        groups |= maker.make_sharing(of_layers)
        groups |= maker.make_sharing(of_replicas)
        groups |= maker.make_sharing(of_matrices, with_others=of_layers | of_replicas, made=groups)
        has_others = make_handle is not None and shape.world_size > 1
        store = make_handle("messages", everyone) if make_handle is not None and has_others else None
        return cls(shape=shape, rank=rank, messages=Messages(rank, shape.world_size, store), **groups)

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


class _GroupMaker:
    """Makes the groups of one rank."""

    def __init__(self, rank: int, make_handle: Callable[[str, Sequence[Sequence[int]]], Any] | None) -> None:
        self.rank = rank
        self.make_handle = make_handle

    def make(self, name: str, rank_lists: _Lists) -> RankGroup:
        """Lists of one rank need no handle; a rank that is in no list is a group by itself."""
        lists = [ranks for ranks in rank_lists if len(ranks) > 1]
        handle = self.make_handle(name, lists) if self.make_handle is not None and lists else None
        own = next((ranks for ranks in lists if self.rank in ranks), None)
        if own is None:
            return RankGroup(name, (self.rank,), 0)
        return RankGroup(name, tuple(own), own.index(self.rank), handle)

    def make_sharing(
        self,
        lists: Mapping[str, _Lists],
        *,
        with_others: Mapping[str, _Lists] | None = None,
        made: Mapping[str, RankGroup] | None = None,
    ) -> dict[str, RankGroup]:
        """One after the other; what has the lists of one before shares its channel."""
        known, groups = dict(with_others or {}), dict(made or {})
        for name, rank_lists in lists.items():
            same = next((other for other, theirs in known.items() if theirs == rank_lists), None)
            groups[name] = (
                self.make(name, rank_lists) if same is None else dataclasses.replace(groups[same], name=name)
            )
            known[name] = rank_lists
        return {name: groups[name] for name in lists}
