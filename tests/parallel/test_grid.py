"""Rank lists against Megatron-LM's own, and the groups that one rank sees."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatrain.parallel.grid import GridShape, RankGrid

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "rank_groups.json").read_text())
CASES = [case for case in GOLDEN["cases"] if "raises" not in case]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['world_size']}-{c['order']}")
def test_rank_lists_are_megatrons(case: dict[str, Any]) -> None:
    dense = GridShape(
        tp=case["tensor"], cp=case["context"], dp=case["data"], pp=case["pipeline"], order=case["order"]
    )
    experts = GridShape(
        tp=case["expert_tensor"],
        ep=case["expert"],
        dp=case["expert_data"],
        pp=case["pipeline"],
        order=case["order"],
    )
    assert {axes: dense.rank_lists(axes) for axes in case["dense"]} == case["dense"]
    assert {axes: experts.rank_lists(axes) for axes in case["experts"]} == case["experts"]


def test_every_rank_makes_the_same_groups_in_the_same_order() -> None:
    made: dict[int, list[Sequence[int]]] = {rank: [] for rank in range(8)}
    for rank in range(8):
        grid = RankGrid.build(
            GridShape(tp=2, dp=2, pp=2), rank, lambda ranks, r=rank: made[r].append(ranks) or "handle"
        )
        assert grid.tp.ranks[grid.tp.rank] == rank
        assert grid.world.handle == "handle"
    assert all(groups == made[0] for groups in made.values())


def test_a_rank_knows_its_place() -> None:
    grid = RankGrid.build(GridShape(tp=2, dp=2, pp=2), 6)
    assert (grid.tp.ranks, grid.dp.ranks, grid.pp.ranks) == ((6, 7), (4, 6), (2, 6))
    assert (grid.tp.rank, grid.dp.rank, grid.pp.rank) == (0, 1, 1)
    assert grid.tp_pp.ranks == (2, 3, 6, 7)
    assert grid.embedding.ranks == (2, 6)


def test_middle_stages_share_no_embedding() -> None:
    grid = RankGrid.build(GridShape(pp=4), 1)
    assert grid.embedding.ranks == (1,)
    assert grid.embedding.size == 1
