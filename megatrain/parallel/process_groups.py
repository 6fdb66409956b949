"""Process groups: how lists of ranks become something that tensors travel over.

    one call a name, on all ranks in the same order:  "tp": 01 23 45 67  ->  NCCL: one split of the world's communicator
                                                                            gloo: each list by its own members alone

Neither way asks a rank to wait for groups that it is not in, so that start-up does not grow with their number.
Collectives have a generous limit while a run starts, and another one from its first step on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout

from megatrain.parallel.grid import RankGrid, RankGroup


def make_group(name: str, rank_lists: Sequence[Sequence[int]], *, timeout: timedelta | None = None) -> Any:
    """The group of the list that this rank is in, made by all ranks of the world; None where it is in no list.

    The lists are disjoint. The world's own process group is used for `world`. `messages` gets a store.
    """
    world = dist.group.WORLD
    assert world is not None, "the world is joined before its parts"
    if name == "world":
        return world
    if name == "messages":
        return _own_store(timeout)
    if world.bound_device_id is not None:
        lists = [list(ranks) for ranks in rank_lists]
        return dist.split_group(world, lists, timeout=timeout, group_desc=name)
    rank = dist.get_rank()
    for ranks in rank_lists:
        if rank in ranks:
            return dist.new_group(
                list(ranks), timeout=timeout, use_local_synchronization=True, group_desc=name
            )
    return None


def _own_store(timeout: timedelta | None) -> Any:
    """A connection of its own to the store by which the ranks have met, as a wait occupies one; its entries are its own.

    Several grids may be built one after the other, by all ranks alike.
    """
    shared: Any = _get_default_store()  # torch's types do not know `clone`
    number = shared.add(f"messages of rank {dist.get_rank()}", 1)
    store = dist.PrefixStore(f"messages {number}", shared.clone())
    if timeout is not None:
        store.set_timeout(timeout)
    return store


def limit_collectives(grid: RankGrid, *, seconds: float) -> None:
    """From now on a collective that takes longer than this fails; messages keep their limit."""
    for group in groups_of(grid):
        _set_pg_timeout(timedelta(seconds=seconds), group.handle)


def groups_of(grid: RankGrid) -> list[RankGroup]:
    """All groups that this rank shares with others."""
    found = [getattr(grid, field.name) for field in dataclasses.fields(grid)]
    return [group for group in found if isinstance(group, RankGroup) and group.handle is not None]
