"""The layout of each file in configs/models/ fits into its GPUs, and is near the fastest that `megatrain plan` finds."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.config import Plan
from megatrain.parallel.grid import RankGrid
from megatrain.tools.plan import memory
from megatrain.tools.plan.hardware import Cluster
from megatrain.tools.plan.layouts import Layout
from megatrain.tools.plan.memory import planned_bytes
from megatrain.tools.plan.search import Run, best_layouts, evaluate
from megatrain.training.planning.gpus import GPUS
from megatrain.training.planning.memory_plan import RecordedStep
from tests.training.planning.test_known_models import FOLDER, ORIGINALS

EVERYDAY = ("gpt2_124m",)
NEAR = 1.15
"""Ratio to the fastest predicted step."""


@pytest.mark.parametrize(
    "name",
    [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.nightly) for name in ORIGINALS],
)
def test_the_layout_of_a_known_model_fits_and_is_near_the_fastest(name: str) -> None:
    gpu = GPUS["H100"]
    cluster = Cluster(gpu=gpu, num_gpus=ORIGINALS[name][0], gpus_per_node=8, network_rate=gpu.network_rate)
    run = Run.of(["--config", str(FOLDER / f"{name}.yaml")], cluster)
    plan, workload = run.plan(), run.workload()
    layout = Layout.of(plan)
    given = evaluate(run, workload, layout, planned_bytes(workload, layout, plan))
    best = best_layouts(run, workload, gpu.usable_bytes, 1)[0]
    assert given.memory_bytes <= gpu.usable_bytes
    assert given.time.total <= NEAR * best.time.total, f"{best.flags} is faster"


@pytest.mark.parametrize(
    ("name", "most_steps"),
    [("gpt2_124m", 6), pytest.param("llama3_405b", 14, marks=pytest.mark.nightly)],
)
def test_a_search_runs_few_steps_for_their_memory(
    name: str, most_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a rank on the meta device takes one to four seconds for 405 billion parameters on 16,384 GPUs."""
    num_steps = 0
    record_step = memory.record_step

    def counted(*args: Any, **kwargs: Any) -> RecordedStep:
        nonlocal num_steps
        num_steps += 1
        return record_step(*args, **kwargs)

    monkeypatch.setattr(memory, "record_step", counted)
    gpu = GPUS["H100"]
    cluster = Cluster(gpu=gpu, num_gpus=ORIGINALS[name][0], gpus_per_node=8, network_rate=gpu.network_rate)
    run = Run.of(["--config", str(FOLDER / f"{name}.yaml")], cluster)
    assert len(best_layouts(run, run.workload(), gpu.usable_bytes, 5 if name == "llama3_405b" else 2)) > 1
    assert 0 < num_steps <= most_steps


def test_no_more_ranks_are_run_once_one_is_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = GPUS["H100"]
    cluster = Cluster(gpu=gpu, num_gpus=8, gpus_per_node=8, network_rate=gpu.network_rate)
    run = Run.of(["--config", str(FOLDER / "gpt2_124m.yaml"), "--num-layers", "4"], cluster)
    layout = Layout(pp=4, dp=2, split=(1, 1, 1, 1))
    steps: list[int] = []
    record_step = memory.record_step

    def recorded(plan: Plan, grid: RankGrid, *args: Any, **kwargs: Any) -> RecordedStep:
        steps.append(grid.pp.rank)
        return record_step(plan, grid, *args, **kwargs)

    monkeypatch.setattr(memory, "record_step", recorded)
    plan, workload = run.plan(layout), run.workload()
    whole = planned_bytes(workload, layout, plan)
    assert sorted(steps) == [0, 3]
    steps.clear()
    assert 0.01 * whole < planned_bytes(workload, layout, plan, limit_bytes=0.0) <= whole
    assert len(steps) == 1
