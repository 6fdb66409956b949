"""Capacities of a rank's experts: bounds of their memory, and their growth after a load that is larger."""

import pytest
import torch

from megatrain.parallel.grid import RankGroup
from megatrain.parallel.rank_capacity import RankCapacities, RankCapacity

WORLD = RankGroup("world", (0,), 0)
CPU = torch.device("cpu")


def test_rows_are_bounded_only_where_they_are_kept_for_a_backward_pass() -> None:
    capacity = RankCapacity(1.25)
    assert capacity.num_rows(1000, 4000) == 1264
    assert capacity.num_rows(1000, 1200) == 1200
    with torch.no_grad():
        assert capacity.num_rows(1000, 4000) == 4000


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_without_a_micro_batch_need_nothing(device: str) -> None:
    capacities = RankCapacities(1.25)
    capacities.add_layer()
    assert not capacities.begin_check(WORLD, torch.device(device))()


def test_capacities_grow_to_the_largest_loads_after_one_that_is_too_large() -> None:
    capacities = RankCapacities(2.0)
    small, near, full, large = (capacities.add_layer() for _ in range(4))
    loads = {small: (10, 20), near: (150, 30), full: (160, 1), large: (161, 320)}
    for layer in (small, near, full):
        for load in loads[layer]:
            layer.record(torch.tensor(load, dtype=torch.int32), layer.num_rows(80, 1000))
    assert not capacities.begin_check(WORLD, CPU)()
    assert {layer.factor for layer in capacities.layers} == {2.0}
    for load in loads[large]:
        large.record(torch.tensor(load, dtype=torch.int32), large.num_rows(80, 1000))
    assert capacities.begin_check(WORLD, CPU)()
    assert small.factor == 2
    assert [layer.num_rows(80, 1000) >= max(loads[layer]) for layer in capacities.layers] == [True] * 4
    assert near.factor == pytest.approx(2 * 1.25 * 150 / 160)
    assert large.factor == pytest.approx(2 * 1.25 * 2)
    assert not capacities.begin_check(WORLD, CPU)()
