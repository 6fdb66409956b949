"""Process groups: how lists of ranks become something that tensors travel over.

    one call a name, on all ranks in the same order:  "tp": 01 23 45 67  ->  NCCL: one split of the world's communicator
                                                                            gloo: each list by its own members alone

Neither way asks a rank to wait for groups that it is not in, so that start-up does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def make_group(name: str, rank_lists: Sequence[Sequence[int]], *, timeout: timedelta | None = None) -> Any:
    """The group of the list that this rank is in, made by all ranks of the world; None where it is in no list.

    The lists are disjoint. The world's own process group is used for a list of all ranks.
    """
    world = dist.group.WORLD
    assert world is not None, "the world is joined before its parts"
    if name == "world":
        return world
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
