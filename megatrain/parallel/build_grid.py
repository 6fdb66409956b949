"""Builds the rank grid: all groups of one rank, created by every rank in the same order.

GridShape -> rank lists by name -> one call of `make_handle` per name with new lists -> RankGrid

Start-up code; `grid.py` has the groups that a step uses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatrain.parallel.grid import Channel, RankGrid, RankGroup
from megatrain.parallel.messages import Messages
from megatrain.parallel.rank_lists import GridShape, RankLists

MakeHandle = Callable[[str, Sequence[Sequence[int]]], Any]
"""Takes a name and its rank lists, and creates the process group of the list that contains this rank."""


def build_grid(shape: GridShape, rank: int, make_handle: MakeHandle | None = None) -> RankGrid:
    """Build the groups of `rank`; without `make_handle` they cannot communicate.

    Groups of the same ranks share a communicator if they are used in turn. Layers and replicas never share one, so that
    collectives of layers do not wait for concurrent reductions of gradients; only routers
    that balance loads over all replicas wait.
    """
    everyone = [list(range(shape.world_size))]
    maker = _GroupMaker(rank, make_handle)
    dense, expert = shape.state_lists("dense"), shape.state_lists("expert")
    separate = {
        "world": everyone,
        "pp": shape.rank_lists("pp"),
        "embedding": shape.embedding_lists(),
    }
    heads, rings = shape.context_levels()
    hosts, peers = shape.expert_levels()
    of_layers = {
        "tp": shape.rank_lists("tp"),
        "kv": shape.kv_lists(),
        "cp": shape.rank_lists("cp"),
        "cp_heads": heads,
        "cp_ring": rings,
        "tp_cp": shape.rank_lists("tp-cp"),
        "etp": shape.expert_lists("etp"),
        "ep": shape.expert_lists("ep"),
        "ep_host": hosts,
        "ep_peers": peers,
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
    channels = _channels(shape, maker)
    groups = {name: maker.make(name, lists) for name, lists in separate.items()}
    groups |= maker.make_sharing(of_layers)
    groups |= maker.make_sharing(of_replicas)
    groups |= maker.make_sharing(of_matrices, with_others=of_layers | of_replicas, made=groups)
    # They share no communicator with replicas: passes of packs do not wait for concurrent reductions.
    contexts = tuple(maker.make(name, lists) for name, lists in shape.pack_lists().items())
    has_store = make_handle is not None and shape.world_size > 1
    store = make_handle("messages", everyone) if make_handle is not None and has_store else None
    return RankGrid(
        shape=shape,
        rank=rank,
        messages=Messages(rank, shape.world_size, store),
        channels=channels,
        contexts=contexts,
        **groups,
    )


def _channels(shape: GridShape, maker: _GroupMaker) -> dict[Channel, RankGroup]:
    """Make the channels of a rank to and from adjacent virtual stages, in the same order on all ranks."""
    found: dict[Channel, RankGroup] = {}
    pipelines = shape.rank_lists("pp")
    own = next(ranks for ranks in pipelines if maker.rank in ranks).index(maker.rank)
    for number, pairs in enumerate(shape.channels()):
        lists = [sorted((ranks[a], ranks[b])) for ranks in pipelines for a, b in pairs]
        ends = [pair for pair in pairs if own in pair]  # one at most
        for is_forward in (True, False):
            group = maker.make(f"pp_{'forward' if is_forward else 'backward'}_{number}", lists)
            found |= {Channel(*(pair if is_forward else pair[::-1]), is_forward): group for pair in ends}
    return found


class _GroupMaker:
    """Makes the groups of one rank."""

    def __init__(self, rank: int, make_handle: MakeHandle | None) -> None:
        self.rank = rank
        self.make_handle = make_handle

    def make(self, name: str, rank_lists: RankLists) -> RankGroup:
        """Make one group. Lists of one rank need no handle; a rank in no list is a group by itself."""
        lists = [ranks for ranks in rank_lists if len(ranks) > 1]
        handle = self.make_handle(name, lists) if self.make_handle is not None and lists else None
        own = next((ranks for ranks in lists if self.rank in ranks), None)
        if own is None:
            return RankGroup(name, (self.rank,), 0)
        return RankGroup(name, tuple(own), own.index(self.rank), handle)

    def make_sharing(
        self,
        lists: Mapping[str, RankLists],
        *,
        with_others: Mapping[str, RankLists] | None = None,
        made: Mapping[str, RankGroup] | None = None,
    ) -> dict[str, RankGroup]:
        """Make groups in order; a group with the same lists as an earlier one shares its handle.

        Args:
            with_others: rank lists of existing groups, which may be shared.
            made: the existing groups.
        """
        known, groups = dict(with_others or {}), dict(made or {})
        for name, rank_lists in lists.items():
            same = next((other for other, theirs in known.items() if theirs == rank_lists), None)
            groups[name] = (
                self.make(name, rank_lists) if same is None else dataclasses.replace(groups[same], name=name)
            )
            known[name] = rank_lists
        return {name: groups[name] for name in lists}
