"""Weight norm and zeros of the gradient are the model's, whatever the layout: each element is counted once."""

import dataclasses

import numpy as np
import pytest
import torch

from megatrain.optim.measures import num_zero_gradients, parameter_norm
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.groups import make_group
from megatrain.tools import parity
from megatrain.tools.worker_pool import WorkerPool
from megatrain.training.engine import Engine
from megatrain.training.launch import grid_shape

LAYOUTS = [
    parity.Layout(tp=2),
    parity.Layout(tp=3, sp=True, is_tied=True, global_batch=12),
    parity.Layout(dp=4),
    parity.Layout(dp=2, is_zero1=False, is_tied=True),
    parity.Layout(pp=4, is_tied=True),
    parity.Layout(tp=2, dp=2, pp=2, sp=True, is_tied=True),
    parity.Layout(tp=2, dp=2, pp=2),
    parity.Layout(tp=4, dp=2, model="gpt2", groups=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_measures_do_not_depend_on_the_layout(pool: WorkerPool, layout: parity.Layout) -> None:
    alone = dataclasses.replace(layout, tp=1, dp=1, pp=1, sp=False)
    (expected,) = pool.run(1, measures, alone)
    found = pool.run(layout.world_size, measures, layout)
    assert {zeros for zeros, _ in found} == {expected[0]}
    assert [norm for _, norm in found] == pytest.approx([expected[1]] * len(found), rel=1e-12)


def test_measures_are_those_of_the_whole_tensors() -> None:
    layout = parity.Layout(global_batch=2)
    (found,) = [measures(0, 1, layout)]
    (reference,) = [parity.measure(0, 1, layout, None)]
    assert found[0] == sum(int((part.values == 0).sum()) for part in reference.gradients) > 1000
    engine = initialized(0, 1, layout)
    squares = sum(float(np.square(part.values).sum()) for part in parity._weights(engine))
    assert found[1] == pytest.approx(squares**0.5, rel=1e-12)


def initialized(rank: int, world_size: int, layout: parity.Layout) -> Engine:
    plan = parity.tiny_plan(layout, world_size)
    grid = RankGrid.build(grid_shape(plan), rank, make_group)
    engine = Engine(plan, grid, torch.device("cpu"))
    engine.initialize()
    return engine


def measures(rank: int, world_size: int, layout: parity.Layout) -> tuple[int, float]:
    engine = initialized(rank, world_size, layout)
    engine.accumulate_gradients(list(parity.own_batches(0, layout, engine.grid.dp.rank)))
    return num_zero_gradients(engine.optimizer), parameter_norm(engine.optimizer)
