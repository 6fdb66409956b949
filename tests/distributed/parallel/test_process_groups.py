"""Process groups of real processes: their members and timeouts."""

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
    """Return for each group the ranks that this rank receives from, and those of the grid."""
    grid = build_grid(SHAPE, rank, make_group)
    return {
        group.name: (all_gather(torch.tensor([rank]), group).tolist(), list(group.ranks))
        for group in groups_of(grid)
    }


def test_groups_have_the_ranks_of_the_grid(pool: WorkerPool) -> None:
    for rank, found in enumerate(pool.run(8, members)):
        assert {"world", "tp", "dp", "pp", "embedding"} <= set(found)
        for received, expected in found.values():
            assert received == expected
            assert rank in expected


def late_peer(rank: int, _: int, text: bool) -> Any:
    """Return rank 0's result of a collective or a message for which rank 1 is two seconds late."""
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


def test_collectives_have_a_timeout_and_messages_wait(pool: WorkerPool) -> None:
    assert pool.run(2, late_peer, True) == [[{"rank": 0}, {"rank": 1}], []]
    try:
        first = pool.run(2, late_peer, False)[0]
    finally:
        pool.close()
    assert "Timed out waiting 1000ms" in first
