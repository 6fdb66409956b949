"""The order in which ranks are numbered changes the process groups but no result."""

from pathlib import Path

import pytest
from metrics_files import logged_losses
from run_here import LAYOUTS, train_here

from megatrain.tools.worker_pool import WorkerPool


@pytest.mark.nightly
def test_stages_before_replicas_train_to_the_same_losses(pool: WorkerPool, tmp_path: Path) -> None:
    world_size, flags = LAYOUTS["tp2 dp2 pp2"]
    found = []
    for name, more in (("replicas first", []), ("stages first", ["--use-tp-pp-dp-mapping"])):
        folder = tmp_path / name
        assert set(pool.run(world_size, train_here, [*flags, *more, "--save", str(folder)])) == {0}
        found.append(logged_losses(folder))
    assert len(found[0]) == 20
    assert found[1] == pytest.approx(found[0], rel=1e-12)
