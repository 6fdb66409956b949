"""The layout of each file in configs/models/ fits into its GPUs, and is near the fastest that `megatrain plan` finds."""

from __future__ import annotations

import pytest

from megatrain.tools.plan.hardware import GPUS, Cluster
from megatrain.tools.plan.layouts import Layout
from megatrain.tools.plan.memory import planned_bytes
from megatrain.tools.plan.search import Run, best_layouts, evaluate
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
