"""Weight norm and gradient zeros of the whole model under every layout: each element counts once."""

import re

import numpy as np
import pytest
from everyday import one_in

from megatrain.optim.sharded import num_zero_gradients, parameter_norm
from megatrain.tools.parity.measure import Job, engine_of, local_batches, measure, tiny_plan, weights_of
from megatrain.tools.parity.rows import Layout
from megatrain.tools.worker_pool import WorkerPool
from megatrain.training.planning.model_summary import model_summary

LAYOUTS = [
    Layout.of(text)
    for text in (
        "tp3 sp tied",
        "tp2",
        "dp4 zero1",
        "dp2 tied",
        "pp4 tied",
        "tp2 sp dp2 zero1 pp2 tied",
        "tp2 dp2 zero1 pp2",
        "tp4 dp2 zero1 groups2",  # without key biases, whose gradients are 0 up to rounding
    )
]


@pytest.mark.parametrize("layout", one_in(5, LAYOUTS), ids=lambda layout: layout.name)
def test_statistics_do_not_depend_on_the_layout(pool: WorkerPool, layout: Layout) -> None:
    (expected,) = pool.run(1, statistics, layout.alone)
    found = pool.run(layout.world_size, statistics, layout)
    assert {zeros for zeros, _ in found} == {expected[0]}
    assert [norm for _, norm in found] == pytest.approx([expected[1]] * len(found), rel=1e-12)


def test_statistics_are_those_of_the_whole_tensors() -> None:
    layout = Layout.of("batch2")
    (found,) = [statistics(0, 1, layout)]
    (reference,) = [measure(0, 1, Job(layout))]
    assert found[0] == sum(int((part.values == 0).sum()) for part in reference.gradients) > 1000
    engine = engine_of(tiny_plan(layout, 1), 0)
    squares = sum(float(np.square(part.values).sum()) for part in weights_of(engine))
    assert found[1] == pytest.approx(squares**0.5, rel=1e-12)


def statistics(rank: int, world_size: int, layout: Layout) -> tuple[int, float]:
    engine = engine_of(tiny_plan(layout, world_size), rank)
    engine.accumulate_gradients(list(local_batches(0, layout, engine.grid.dp.rank)))
    return int(num_zero_gradients(engine.optimizer)), float(parameter_norm(engine.optimizer))


@pytest.mark.parametrize("text", ["mixtral", "dp2 mixtral ep2", "tp2 sp dp2 pp2 mixtral ep2 etp2 tied mtp1"])
def test_parameters_are_counted_exactly_though_ranks_hold_parts(pool: WorkerPool, text: str) -> None:
    """Three of ten experts per token: no share of a tensor is a whole number."""
    layout = Layout.of(text)
    (expected,) = pool.run(1, summary, layout.alone)
    assert set(pool.run(layout.world_size, summary, layout)) == {expected}
    of_one = 3 * 48 * 14
    total, active = (int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", expected))
    assert total - active == (4 + layout.has("mtp1")) * 7 * of_one


TEN_EXPERTS = "--num-experts 10 --moe-router-topk 3 --moe-ffn-hidden-size 14".split()


def summary(rank: int, world_size: int, layout: Layout) -> str:
    lines = model_summary(engine_of(tiny_plan(layout, world_size, *TEN_EXPERTS), rank))
    return lines.partition(";")[0]
