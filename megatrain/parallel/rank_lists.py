"""Rank lists: which ranks form each group, from the sizes of the parallel axes alone.

    world 8, tp 2, dp 2, pp 2:   pp 0: dp 0: ranks 0 1 | dp 1: ranks 2 3      tp groups 01 23 45 67
                                 pp 1: dp 0: ranks 4 5 | dp 1: ranks 6 7      dp 02 13 46 57, pp 04 15 26 37
    its experts with ep 4, etp 1:       experts' ranks 0 1 2 3 | 4 5 6 7      ep 0123 4567, expert replicas: each alone

Ranks are numbered as in Megatron-LM: the first axis in `order` varies fastest. Experts factorise the same ranks
by their own axes, with the same pipelines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatrain.parallel.pipeline.actions import Placement

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
STAGES_BEFORE_REPLICAS = "tp-cp-ep-pp-dp"
"""The order of --use-tp-pp-dp-mapping: ranks of a pipeline are closer than replicas."""

Family = Literal["dense", "expert"]
"""The factorisation of the ranks that a parameter follows."""

RankLists = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class StateLists:
    """The rank lists of `FamilyGroups`; a rank in no list is alone."""

    replicas: RankLists
    shard: RankLists
    copies: RankLists
    matrix: RankLists


@dataclass(frozen=True, kw_only=True)
class GridShape:
    """Sizes of the axes.

    Raises:
        ValueError: experts do not divide the ranks, or their pipelines would differ from the pipelines of dense layers.
    """

    tp: int = 1
    cp: int = 1
    cp_heads: int = 1
    """Number of consecutive context ranks that exchange heads, under a two-level cp_comm_type."""
    dp: int = 1
    pp: int = 1
    ep: int = 1
    """Number of ranks with different experts."""
    ep_host: int = 1
    """Number of consecutive ranks of ep that forward tokens to one another, on one host; 1: tokens are not forwarded."""
    etp: int | None = None
    """Number of ranks that share each expert. None: there are no experts; they share the groups of dense layers."""
    kv_copies: int = 1
    """Number of consecutive tensor ranks with the same keys and values, if there are fewer query groups than ranks."""
    order: str = DEFAULT_ORDER
    num_chunks: int = 1
    """Model chunks of each pipeline rank."""
    is_v: bool = False
    """The second chunks are in reverse order of the ranks."""
    embedding_ranks: tuple[int, ...] = (0, -1)
    """Pipeline ranks that share the word embedding, if several hold it."""
    dp_copies: int = 1
    """Number of optimizer instances: runs of consecutive replicas that together hold all optimizer state."""
    expert_copies: int = 1
    """The same for the replicas of experts."""
    pack_sizes: tuple[int, ...] = ()
    """Sizes of the groups of replicas that may share a pack of documents."""
    has_matrices: bool = False
    """The optimizer assembles whole matrices from their shards, as Muon does."""

    def __post_init__(self) -> None:
        if self.etp is None:
            assert self.ep == 1, "without experts nothing is split over ep"
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
        """Return the groups of dense layers whose members vary over `axes` ("tp", "dp-cp"), fastest axis of `order` first."""
        sizes = {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp}
        return _rank_lists(sizes, self.order, axes)

    def expert_lists(self, axes: str) -> list[list[int]]:
        """Return the groups of experts, whose axes are "etp", "ep", "edp" (replicas) and "pp"."""
        if self.etp is None:
            names = {"etp": "tp", "edp": "cp-dp"}
            return self.rank_lists("-".join(names.get(name, name) for name in axes.split("-")))
        sizes = {"etp": self.etp, "cp": 1, "ep": self.ep, "edp": self.expert_replicas, "pp": self.pp}
        order = self.order.replace("tp", "etp").replace("dp", "edp")
        return _rank_lists(sizes, order, axes)

    def kv_lists(self) -> list[list[int]]:
        """Return the tensor ranks that hold the same keys and values."""
        assert self.tp % self.kv_copies == 0, (
            f"{self.tp} tensor ranks do not split into groups of {self.kv_copies}"
        )
        return _runs(self.rank_lists("tp"), self.kv_copies)

    def context_levels(self) -> tuple[RankLists, RankLists]:
        """Return the runs of context ranks that exchange heads, and the ranks with the same index in them."""
        return _levels(self.rank_lists("cp"), self.cp_heads)

    def expert_levels(self) -> tuple[RankLists, RankLists]:
        """Return the runs of ranks of ep that forward tokens to one another, and the ranks with the same index in them."""
        return _levels(self.expert_lists("ep"), self.ep_host)

    def pack_lists(self) -> dict[str, RankLists]:
        """Return the runs of replicas that may share a pack, by the name of each size above one."""
        return {
            f"context_{size}": _runs(self.rank_lists("dp-cp"), size) for size in self.pack_sizes if size > 1
        }

    def state_lists(self, family: Family) -> StateLists:
        """Return the ranks that hold the weights and the optimizer state of a family."""
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
            copies=[ranks[index::size] for ranks in replicas for index in range(size)] if copies > 1 else [],
            matrix=matrix,
        )

    @property
    def placement(self) -> Placement:
        """Ranks of the virtual stages."""
        return Placement(self.pp, self.num_chunks, is_v=self.is_v)

    def channels(self) -> list[list[tuple[int, int]]]:
        """Return the pairs of pipeline ranks with adjacent virtual stages, in lists of disjoint pairs.

        0 > 1 > 2 > 3, interleaved:  01 23 | 12 30        in a V:  01 23 | 12 | 32 10 | 21
        """
        lists: list[list[tuple[int, int]]] = []
        for pair in self.placement.adjacent_ranks:
            free = (known for known in lists if not {rank for one in known for rank in one} & set(pair))
            found = next(free, None)
            if found is None:
                lists.append([pair])
            else:
                found.append(pair)
        return lists

    def embedding_lists(self) -> list[list[int]]:
        """Return the ranks of each pipeline that share the word embedding."""
        lists = self.rank_lists("pp")
        return [list(dict.fromkeys(ranks[index] for index in self.embedding_ranks)) for ranks in lists]


def embedding_ranks(placement: Placement, *, is_tied: bool, later_stage: int | None) -> tuple[int, ...]:
    """Return the pipeline ranks that hold the word embedding: of the first stage, of a later one that embeds tokens, of a tied head.

    Args:
        later_stage: virtual stage of multi-token prediction, or of the first layer of a decoder after an encoder; None: none.
    """
    stages = {
        0,
        *([] if later_stage is None else [later_stage]),
        *([placement.num_stages - 1] if is_tied else []),
    }
    return tuple(sorted(set(map(placement.rank, stages))))


def _rank_lists(sizes: Mapping[str, int], order: str, axes: str) -> RankLists:
    names = order.split("-")
    varying = set(axes.split("-"))
    assert varying <= set(names), f"{axes} is not made of {names}"
    ranks = np.arange(int(np.prod(list(sizes.values())))).reshape([sizes[name] for name in reversed(names)])
    dims = {name: len(names) - 1 - index for index, name in enumerate(names)}
    slow_to_fast = [n for n in reversed(names) if n not in varying] + [
        n for n in reversed(names) if n in varying
    ]
    members = int(np.prod([sizes[name] for name in varying]))
    lists: RankLists = ranks.transpose([dims[name] for name in slow_to_fast]).reshape(-1, members).tolist()
    return lists


def _levels(lists: RankLists, size: int) -> tuple[RankLists, RankLists]:
    """Cut each list into runs of consecutive ranks; return the runs, and the ranks with the same index in them."""
    if size == 1:
        return [], []
    return _runs(lists, size), [ranks[index::size] for ranks in lists for index in range(size)]


def _runs(lists: RankLists, size: int) -> RankLists:
    """Cut each list into runs of consecutive ranks; return none for runs of one rank."""
    if size == 1:
        return []
    if size == len(lists[0]):
        return lists
    return [ranks[first : first + size] for ranks in lists for first in range(0, len(ranks), size)]
