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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
STAGES_BEFORE_REPLICAS = "tp-cp-ep-pp-dp"
"""The order of --use-tp-pp-dp-mapping: neighbours in a pipeline are closer than replicas."""

Family = Literal["dense", "expert"]
"""Which of the two factorisations of the ranks a parameter follows."""

RankLists = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class StateLists:
    """The lists that `FamilyGroups` are made of; a rank that is in no list is alone."""

    replicas: RankLists
    shard: RankLists
    copies: RankLists
    matrix: RankLists


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

    def context_levels(self) -> tuple[RankLists, RankLists]:
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
        matrix: RankLists = []
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


def _rank_lists(sizes: Mapping[str, int], order: str, axes: str) -> RankLists:
    names = order.split("-")
    varying = set(axes.split("-"))
    assert varying <= set(names), f"{axes} is not made of {names}"
    ranks = np.arange(int(np.prod(list(sizes.values())))).reshape([sizes[name] for name in reversed(names)])
    places = {name: len(names) - 1 - place for place, name in enumerate(names)}
    slow_to_fast = [n for n in reversed(names) if n not in varying] + [
        n for n in reversed(names) if n in varying
    ]
    members = int(np.prod([sizes[name] for name in varying]))
    lists: RankLists = ranks.transpose([places[name] for name in slow_to_fast]).reshape(-1, members).tolist()
    return lists


def _runs(lists: RankLists, size: int) -> RankLists:
    """Each list cut into runs of neighbours; those of one rank are left out."""
    if size == 1:
        return []
    if size == len(lists[0]):
        return lists
    return [ranks[first : first + size] for ranks in lists for first in range(0, len(ranks), size)]
