"""Process groups: turns rank lists into communicators of torch.distributed.

    one call per name, on all ranks in the same order:  "tp": 01 23 45 67  ->  NCCL: one split of the world's communicator
                                                                               gloo: each list by its members only

Neither way makes a rank wait for groups that it is not in, so start-up time does not grow with their number.
Collectives have a generous timeout while a run starts, and another one from its first step on.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _abort_process_group,
    _get_default_store,
    _set_pg_timeout,
    _world,
)

from megatrain.config.nccl_options import GroupOptions, options_of
from megatrain.parallel.grid import RankGrid, RankGroup


def make_group(
    name: str,
    rank_lists: Sequence[Sequence[int]],
    *,
    timeout: timedelta | None = None,
    options: GroupOptions | None = None,
) -> Any:
    """Create the group of the list that contains this rank, or None if no list does; all ranks of the world call it.

    The lists are disjoint. `world` returns the world's own process group, `messages` a store. `options` are NCCL's.
    """
    world = dist.group.WORLD
    assert world is not None, "initialise torch.distributed first"
    if name == "world":
        return world
    if name == "messages":
        return _separate_store(timeout)
    if world.bound_device_id is not None:
        parent: Any = world._get_backend(world.bound_device_id)  # noqa: SLF001 (as split_group does)
        chosen = copy.deepcopy(parent.options)
        for option, value in options_of(name, options or {}).items():
            setattr(chosen if option == "is_high_priority_stream" else chosen.config, option, value)
        lists = [list(ranks) for ranks in rank_lists]
        return dist.split_group(world, lists, timeout=timeout, pg_options=chosen, group_desc=name)
    rank = dist.get_rank()
    # torch names a group by its ranks and the number of groups that this rank has: a rank in no list makes one of its own.
    own = next((list(ranks) for ranks in rank_lists if rank in ranks), [rank])
    group = dist.new_group(own, timeout=timeout, use_local_synchronization=True, group_desc=name)
    return group if len(own) > 1 else None


def groups_to_destroy() -> list[Any]:
    """Return all process groups of this rank, the last created first; the world's is the last."""
    return list(reversed(_world.pg_map))


def destroy_groups() -> None:
    """Destroy all process groups of this rank, the last created first.

    The ranks of an NCCL communicator destroy it together, so they need one order. All ranks create groups in the same
    order. `dist.destroy_process_group` alone follows the groups' names, which contain the number of groups that
    a rank has: four pipeline stages then wait for one another in a circle.
    """
    for group in groups_to_destroy():
        dist.destroy_process_group(group)


def abort_groups() -> None:
    """Let all waits for collectives of NCCL fail, in every thread; `forget_groups` follows.

    Gloo's waits end with its connections. Its `abort` ends the threads that run collectives, so that a later one would wait forever.
    """
    groups = [group for group in groups_to_destroy() if dist.get_backend(group) == "nccl"]
    backends = [group._get_backend(torch.device("cuda")) for group in groups]  # noqa: SLF001
    # As torch aborts all groups: communicators that abort one by one may wait for each other.
    for world in backends[-1:]:
        world._group_start()  # noqa: SLF001
    for group in groups:
        group.abort()
    for world in backends[-1:]:
        world._group_end()  # noqa: SLF001


def forget_groups() -> None:
    """Remove all groups, whose collectives failed, from torch.distributed: `init_process_group` may follow."""
    if dist.is_initialized():
        _abort_process_group()


def _separate_store(timeout: timedelta | None) -> Any:
    """Connect once more to the rendezvous store, since a wait occupies a connection, with a key prefix of its own.

    All ranks may build several grids in the same order; each gets another prefix.
    """
    shared: Any = _get_default_store()  # torch's types do not know `clone`
    number = shared.add(f"messages of rank {dist.get_rank()}", 1)
    store = dist.PrefixStore(f"messages {number}", shared.clone())
    if timeout is not None:
        store.set_timeout(timeout)
    return store


def limit_collectives(grid: RankGrid, *, seconds: float) -> None:
    """Set the timeout of all collectives from now on; messages keep theirs."""
    for group in (*groups_of(grid), *grid.channels.values()):
        _set_pg_timeout(timedelta(seconds=seconds), group.handle)


def groups_of(grid: RankGrid) -> list[RankGroup]:
    """Return all groups of collectives in which this rank communicates."""
    found = [*grid.contexts, *(getattr(grid, field.name) for field in dataclasses.fields(grid))]
    return [group for group in found if isinstance(group, RankGroup) and group.handle is not None]


def collective_calls(grid: RankGrid) -> dict[str, int]:
    """Return the number of collectives that this rank has called so far, by the name and the ranks of the group."""
    return {
        f"{group.name} of ranks {group.ranks[0]} to {group.ranks[-1]}": group.handle._get_sequence_number_for_group()  # noqa: SLF001 (no public access)
        for group in groups_of(grid)
    }
