"""Whole runs with context parallelism log the numbers of one process: training, evaluation, resuming under another layout."""

from pathlib import Path
from typing import Any

import pytest
from run_here import train_here
from test_resume import metrics

from megatrain.tools.worker_pool import WorkerPool

EXACT = ["--params-dtype", "float64", "--train-iters", "6", "--eval-interval", "3"]
CP2 = ["--context-parallel-size", "2"]


@pytest.mark.nightly
def test_losses_evaluations_and_a_resumed_run_equal_those_of_one_process(
    pool: WorkerPool, tmp_path: Path
) -> None:
    assert set(pool.run(1, train_here, [*EXACT, "--save", str(tmp_path / "one")])) == {0}
    folder = ["--save", str(tmp_path / "cp"), "--load", str(tmp_path / "cp"), "--load-or-start"]
    assert set(pool.run(4, train_here, [*EXACT, *folder, *CP2, "--exit-interval", "4"])) == {75}
    tp2 = [*CP2, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--cp-comm-type", "a2a"]
    assert set(pool.run(4, train_here, [*EXACT, *folder, *tp2])) == {0}
    alone, shared = logged(tmp_path / "one"), logged(tmp_path / "cp")
    assert [sorted(one) for one in alone] == [sorted(one) for one in shared]
    assert sum("grad_norm" in one for one in alone) == 6
    assert len(alone) > 8
    for one, other in zip(alone, shared, strict=True):
        assert other == pytest.approx(one, rel=1e-9)


def logged(folder: Path) -> list[dict[str, Any]]:
    """Return the numbers of each line that do not depend on speed."""
    return [
        {name: value for name, value in line.items() if isinstance(value, int | float)}
        for line in metrics(folder)
    ]
