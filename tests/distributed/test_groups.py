"""Process groups among real processes: who is in them, and how long they wait."""

import time
from typing import Any

import torch

from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.collectives import all_gather, all_reduce
from megatrain.parallel.process_groups import groups_of, limit_collectives, make_group
from megatrain.parallel.rank_lists import STAGES_BEFORE_REPLICAS, GridShape
from megatrain.tools.worker_pool import WorkerPool

SHAPE = GridShape(tp=2, dp=2, pp=2, order=STAGES_BEFORE_REPLICAS)


def members(rank: int, _: int) -> dict[str, tuple[list[int], list[int]]]:
    """Of each group: whom this rank hears, and whom the grid says it does."""
    grid = build_grid(SHAPE, rank, make_group)
    return {
        group.name: (all_gather(torch.tensor([rank]), group).tolist(), list(group.ranks))
        for group in groups_of(grid)
    }


def test_groups_hold_the_ranks_that_the_grid_names(pool: WorkerPool) -> None:
    for rank, found in enumerate(pool.run(8, members)):
        assert {"world", "tp", "dp", "pp", "embedding"} <= set(found)
        for heard, named in found.values():
            assert heard == named
            assert rank in named


def impatient(rank: int, _: int, text: bool) -> Any:
    """What rank 0 gets when rank 1 comes two seconds late, to a tensor's meeting or a message's."""
    grid = build_grid(GridShape(dp=2), rank, make_group)
    limit_collectives(grid, seconds=1)
    if rank == 1:
        time.sleep(2)
    try:
        return grid.messages.gather({"rank": rank}) if text else all_reduce(torch.ones(1), grid.dp).item()
    except RuntimeError as error:
        return str(error)
    finally:
        limit_collectives(grid, seconds=60)  # for the end of the job


def test_collectives_have_a_limit_and_messages_wait(pool: WorkerPool) -> None:
    assert pool.run(2, impatient, True) == [[{"rank": 0}, {"rank": 1}], []]
    try:
        first = pool.run(2, impatient, False)[0]
    finally:
        pool.close()
    assert "Timed out waiting 1000ms" in first
