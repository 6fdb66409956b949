"""What data parallelism does beside the computation changes no bit of the result."""

import dataclasses

import numpy as np
import pytest
import torch

from megatrain.parallel.grid import RankGrid
from megatrain.parallel.groups import make_group
from megatrain.tools import parity
from megatrain.tools.worker_pool import WorkerPool
from megatrain.training.engine import Engine, schedules_of
from megatrain.training.launch import grid_shape

BF16 = ("--bf16", "--params-dtype", "bfloat16")
NO_OVERLAP = ("--no-overlap-grad-reduce", "--no-overlap-param-gather")


def made(rank: int, world_size: int, layout: parity.Layout, flags: tuple[str, ...]) -> Engine:
    plan = parity.tiny_plan(layout, world_size, *flags)
    grid = RankGrid.build(grid_shape(plan), rank, make_group)
    engine = Engine(plan, grid, torch.device("cpu"))
    engine.initialize()
    return engine


def trained(
    rank: int, world_size: int, layout: parity.Layout, flags: tuple[str, ...]
) -> tuple[list[tuple[float, float]], list[np.ndarray]]:
    """Loss and norm of three steps, the sums behind one more evaluation, and this rank's state."""
    engine = made(rank, world_size, layout, flags)
    found = []
    for step in range(parity.NUM_STEPS):
        batches = list(parity.own_batches(step, layout, engine.grid.dp.rank))
        report = engine.step(
            batches, schedules_of(engine.plan).at(0), first_sample=step * layout.global_batch
        )
        found.append((report.lm_loss, report.grad_norm))
    loss, tokens = engine.evaluate(batches).tolist()
    state = [flat for kind in engine.optimizer.kinds for flat in engine.optimizer.state(kind)]
    return [*found, (loss, tokens)], [flat.double().numpy() for flat in state]


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (parity.Layout(dp=3, is_tied=True, global_batch=12), ()),
        (parity.Layout(dp=4), BF16),
        (parity.Layout(dp=2, is_zero1=False), BF16),
        (parity.Layout(tp=2, dp=2, pp=2, sp=True, is_tied=True), BF16),
    ],
    ids=lambda value: value.name if isinstance(value, parity.Layout) else "-".join(value),
)
def test_overlap_changes_no_bit(pool: WorkerPool, layout: parity.Layout, flags: tuple[str, ...]) -> None:
    with_overlap = pool.run(layout.world_size, trained, layout, flags)
    without = pool.run(
        layout.world_size, trained, dataclasses.replace(layout, has_overlap=False), (*flags, *NO_OVERLAP)
    )
    for (numbers, state), (expected_numbers, expected_state) in zip(with_overlap, without, strict=True):
        assert numbers == expected_numbers
        assert all(np.array_equal(a, b) for a, b in zip(state, expected_state, strict=True))
