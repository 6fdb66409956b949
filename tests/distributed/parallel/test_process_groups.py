"""Process groups of real processes: their members and timeouts."""

import graphlib
import hashlib
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from run_here import train_here

from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.collectives import all_gather, all_reduce
from megatrain.parallel.process_groups import groups_of, groups_to_destroy, limit_collectives, make_group
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


def threads_of_groups(_rank: int, _world_size: int) -> int:
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo" in name for name in names)


def test_a_run_that_has_ended_keeps_no_group(pool: WorkerPool) -> None:
    """Threads of groups take time from later runs of this process."""
    before = pool.run(1, threads_of_groups)
    short = "--num-layers 1 --train-iters 1 --lr-warmup-iters 0 --eval-iters 0 --tensor-model-parallel-size 2"
    assert set(pool.run(2, train_here, short.split())) == {0}
    assert pool.run(1, threads_of_groups) == before


Group = tuple[str, ...]
"""Name and ranks of a group."""


def order_of_destruction(rank: int, _: int, shape: GridShape) -> list[Group]:
    build_grid(shape, rank, make_group)
    return [
        (group.group_desc, *map(str, dist.get_process_group_ranks(group))) for group in groups_to_destroy()
    ]


def torch_order_with_nccl(shape: GridShape, rank: int) -> list[Group]:
    """Return the order of `dist.destroy_process_group()`: descending hashes of the ranks and the number of groups until then."""
    names: dict[Group, str] = {("world", *map(str, range(shape.world_size))): "0"}

    def make(name: str, lists: Sequence[Sequence[int]]) -> str:
        for ranks in lists:
            if rank in ranks and name not in ("world", "messages"):
                text = "_".join(map(str, (*ranks, len(names))))
                names[name, *map(str, ranks)] = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        return "handle"

    build_grid(shape, rank, make)
    return sorted(names, key=names.__getitem__, reverse=True)


def wait_in_a_circle(orders: Sequence[Sequence[Group]]) -> bool:
    """Return whether ranks that destroy their groups one by one, each together with its members, wait for one another."""
    sorter: graphlib.TopologicalSorter[Group] = graphlib.TopologicalSorter()
    for order in orders:
        for before, after in itertools.pairwise(group for group in order if len(group) > 2):
            sorter.add(after, before)
    try:
        sorter.prepare()
    except graphlib.CycleError:
        return True
    return False


V_OF_FOUR = GridShape(pp=4, num_chunks=2, is_v=True)


@pytest.mark.parametrize("shape", [
    GridShape(pp=3), GridShape(pp=4), V_OF_FOUR, GridShape(tp=2, pp=4), GridShape(dp=2, pp=4, ep=2, etp=1),
], ids=str)  # fmt: skip
def test_ranks_destroy_groups_without_waiting_in_a_circle(pool: WorkerPool, shape: GridShape) -> None:
    orders = pool.run(shape.world_size, order_of_destruction, shape)
    assert not wait_in_a_circle(orders)
    assert all(order[-1] == ("default_pg", *map(str, range(shape.world_size))) for order in orders)
    assert all(any("pp_forward" in name for name, *_ in order) for order in orders)


def test_the_order_of_torch_is_a_circle_with_four_stages() -> None:
    assert wait_in_a_circle([torch_order_with_nccl(V_OF_FOUR, rank) for rank in range(4)])
    assert not wait_in_a_circle([torch_order_with_nccl(GridShape(pp=2), rank) for rank in range(2)])


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
