"""Rank lists against Megatron-LM's own, and the groups that one rank sees."""

import gc
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.rank_lists import DEFAULT_ORDER, STAGES_BEFORE_REPLICAS, GridShape

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "rank_groups.json").read_text())
CASES = [case for case in GOLDEN["cases"] if "raises" not in case]
RAISING = [case for case in GOLDEN["cases"] if "raises" in case]
COLUMNS = ("tp", "pp", "dp", "cp", "dp-cp", "ep", "etp", "edp")
"""Groups for which Megatron-LM recorded each rank's index."""


def shape_of(case: dict[str, Any]) -> GridShape:
    return GridShape(
        tp=case["tensor"],
        cp=case["context"],
        dp=case["data"],
        pp=case["pipeline"],
        ep=case["expert"],
        etp=case["expert_tensor"],
        order=case["order"],
    )


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['world_size']}-{c['order']}")
def test_rank_lists_are_those_of_megatron(case: dict[str, Any]) -> None:
    shape = shape_of(case)
    assert shape.expert_replicas == case["expert_data"]
    assert {axes: shape.rank_lists(axes) for axes in case["dense"]} == case["dense"]
    assert {axes: shape.expert_lists(of_experts(axes)) for axes in case["experts"]} == case["experts"]

    for rank, *indices in case["ranks"]:
        lists = [
            shape.expert_lists(name) if name in ("ep", "etp", "edp") else shape.rank_lists(name)
            for name in COLUMNS
        ]
        found = [next(group.index(rank) for group in groups if rank in group) for groups in lists]
        assert dict(zip(COLUMNS, found, strict=True)) == dict(zip(COLUMNS, indices, strict=True))
        grid = build_grid(shape, rank)
        groups = (grid.tp, grid.pp, grid.dp, grid.cp, grid.replicas, grid.ep, grid.etp, grid.expert_replicas)
        assert [group.rank for group in groups] == indices


def of_experts(axes: str) -> str:
    return "-".join({"tp": "etp", "dp": "edp"}.get(name, name) for name in axes.split("-"))


@pytest.mark.parametrize("case", RAISING, ids=lambda c: f"{c['world_size']}-{c['order']}")
def test_orders_with_other_pipelines_for_experts_raise_as_in_megatron(case: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="experts would have other pipelines"):
        shape_of(case)


def test_experts_need_ranks_that_divide() -> None:
    with pytest.raises(ValueError, match="8 ranks do not divide into 3 = etp"):
        GridShape(dp=8, ep=3, etp=1)


@pytest.mark.parametrize("order", [DEFAULT_ORDER, STAGES_BEFORE_REPLICAS])
def test_65536_ranks_take_less_than_a_second(order: str) -> None:
    experts = {"ep": 64, "etp": 1} if order == DEFAULT_ORDER else {"ep": 2, "etp": 8}
    shape, seconds = GridShape(tp=8, cp=2, dp=256, pp=16, order=order, **experts), []
    for _ in range(3):
        gc.disable()  # collections would search all objects of the test process, not those of the grid
        began = time.process_time()
        grid = build_grid(shape, 54321)
        seconds.append(time.process_time() - began)
        gc.enable()
    assert min(seconds) < 1.0
    assert (grid.world.size, grid.tp.size, grid.dp.size, grid.pp.size) == (65536, 8, 256, 16)
    assert (grid.replicas.size, grid.tp_cp.size) == (512, 16)
    assert grid.expert_replicas.size * grid.ep.size * grid.etp.size * 16 == 65536


def test_every_rank_makes_the_same_groups_in_the_same_order() -> None:
    made: dict[int, list[tuple[str, Sequence[Sequence[int]]]]] = {rank: [] for rank in range(8)}
    for rank in range(8):
        grid = build_grid(
            GridShape(tp=2, dp=2, pp=2),
            rank,
            lambda name, lists, r=rank: made[r].append((name, lists)) or "handle",
        )
        assert grid.tp.ranks[grid.tp.rank] == rank
        assert grid.world.handle == "handle"
    assert all(groups == made[0] for groups in made.values())


def test_a_rank_has_its_index_in_each_group() -> None:
    grid = build_grid(GridShape(tp=2, dp=2, pp=2), 6)
    assert (grid.tp.ranks, grid.dp.ranks, grid.pp.ranks) == ((6, 7), (4, 6), (2, 6))
    assert (grid.tp.rank, grid.dp.rank, grid.pp.rank) == (0, 1, 1)
    assert grid.embedding.ranks == (2, 6)


def test_optimizer_instances_are_runs_along_dp() -> None:
    shape = GridShape(tp=2, dp=4, dp_copies=2)
    lists = shape.state_lists("dense")
    assert lists.shard == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert lists.copies == [[0, 4], [2, 6], [1, 5], [3, 7]]
    made: dict[str, Sequence[Sequence[int]]] = {}
    grid = build_grid(shape, 5, lambda name, lists: made.update({name: lists}) or "handle")
    assert (grid.dp_shard.ranks, grid.dp_shard.rank) == ((5, 7), 0)
    assert (grid.dp_copies.ranks, grid.dp_copies.rank) == ((1, 5), 1)
    assert (made["dp_shard"], made["dp_copies"]) == (lists.shard, lists.copies)


@pytest.mark.parametrize(("copies", "is_sharded"), [(1, True), (4, False)])
def test_a_group_of_all_of_dp_shares_its_communicator(copies: int, is_sharded: bool) -> None:
    made: list[str] = []
    shape = GridShape(dp=4, dp_copies=copies)
    grid = build_grid(shape, 1, lambda name, _lists: made.append(name) or name)
    whole, alone = (grid.dp_shard, grid.dp_copies) if is_sharded else (grid.dp_copies, grid.dp_shard)
    assert (whole.ranks, whole.handle) == (grid.dp.ranks, "dp")
    assert (alone.ranks, alone.handle) == ((1,), None)
    assert [name for name in made if name.startswith("dp")] == ["dp"]


def test_consecutive_tensor_ranks_hold_the_same_keys() -> None:
    shape = GridShape(tp=4, dp=2, kv_copies=2)
    assert shape.kv_lists() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    grid = build_grid(shape, 7)
    assert (grid.kv.ranks, grid.kv.rank) == ((6, 7), 1)
    assert [build_grid(shape, rank).is_first_of(("kv",)) for rank in range(4)] == [True, False] * 2
    assert build_grid(GridShape(tp=4), 3).kv.ranks == (3,)


def test_middle_stages_share_no_embedding() -> None:
    grid = build_grid(GridShape(pp=4), 1)
    assert grid.embedding.ranks == (1,)
    assert grid.embedding.size == 1


def test_context_ranks_are_replicas_too() -> None:
    shape = GridShape(tp=2, cp=2, dp=2)
    grid = build_grid(shape, 6)
    assert (grid.cp.ranks, grid.dp.ranks, grid.tp_cp.ranks) == ((4, 6), (2, 6), (4, 5, 6, 7))
    assert (grid.replicas.ranks, grid.replicas.rank) == ((0, 2, 4, 6), 3)
    assert grid.dp_shard.ranks == grid.replicas.ranks
    halves = build_grid(GridShape(tp=2, cp=2, dp=2, dp_copies=2), 6)
    assert (halves.dp_shard.ranks, halves.dp_copies.ranks) == ((4, 6), (2, 6))


@pytest.mark.parametrize(("etp", "ep", "expert_replicas", "matrix"), [
    (1, 1, (0, 1, 2, 3), (0, 1, 2, 3)),
    (1, 2, (0, 2), (0, 2)),
    (2, 1, (0, 2), (0, 1, 2, 3)),
    (2, 2, (2,), (2, 3)),
    (1, 4, (2,), (2,)),
])  # fmt: skip
def test_experts_factorise_the_ranks_in_their_own_way(
    etp: int, ep: int, expert_replicas: tuple[int, ...], matrix: tuple[int, ...]
) -> None:
    grid = build_grid(GridShape(tp=2, dp=2, pp=2, etp=etp, ep=ep, has_matrices=True), 2)
    assert grid.family("expert").replicas.ranks == grid.expert_shard.ranks == expert_replicas
    assert grid.expert_matrix.ranks == matrix
    assert (grid.family("dense").replicas.ranks, grid.matrix.ranks) == ((0, 2), (0, 1, 2, 3))


def test_without_experts_no_groups_are_made_for_them() -> None:
    made: list[str] = []
    shape = GridShape(tp=2, cp=2, dp=2, pp=2, order=STAGES_BEFORE_REPLICAS)
    grid = build_grid(shape, 0, lambda name, _lists: made.append(name) or name)
    assert made == [
        "pp_forward_0", "pp_backward_0", "world", "pp", "embedding", "tp", "cp", "tp_cp", "dp", "replicas", "messages",
    ]  # fmt: skip
    assert (grid.expert_replicas.handle, grid.etp.handle) == ("replicas", "tp")


def test_layers_and_replicas_share_no_communicator() -> None:
    """The same ranks, but two communicators: one layer dispatches tokens while another one's gradients are reduced."""
    grid = build_grid(GridShape(tp=2, cp=1, dp=1, etp=1, ep=1), 0, lambda name, _lists: name)
    assert (grid.tp.ranks, grid.expert_replicas.ranks) == ((0, 1), (0, 1))
    assert (grid.tp.handle, grid.expert_replicas.handle) == ("tp", "expert_replicas")


@pytest.mark.parametrize(("shape", "lists"), [
    (GridShape(pp=4), [[(0, 1), (2, 3)], [(1, 2)]]),
    (GridShape(pp=3, num_chunks=2), [[(0, 1)], [(1, 2)], [(2, 0)]]),
    (GridShape(pp=4, num_chunks=2), [[(0, 1), (2, 3)], [(1, 2), (3, 0)]]),
    (GridShape(pp=4, num_chunks=2, is_v=True), [[(0, 1), (2, 3)], [(1, 2)], [(3, 2), (1, 0)], [(2, 1)]]),
    (GridShape(), []),
])  # fmt: skip
def test_ranks_with_adjacent_stages_share_channels(
    shape: GridShape, lists: list[list[tuple[int, int]]]
) -> None:
    assert shape.channels() == lists
    made: dict[int, list[str]] = {}
    for rank in range(shape.pp):
        names: list[str] = []
        grid = build_grid(shape, rank, lambda name, _lists, names=names: names.append(name) or name)
        made[rank] = names
        expected = [pair for pairs in lists for pair in pairs if rank in pair]
        assert [(one.sender, one.receiver) for one in grid.channels if one.is_forward] == expected
        assert [(one.receiver, one.sender) for one in grid.channels if not one.is_forward] == expected
        assert all({one.sender, one.receiver} == {*group.ranks} for one, group in grid.channels.items())
        assert len({group.handle for group in grid.channels.values()}) == len(grid.channels)
    assert all(names == made[0] for names in made.values())
