"""The example of docs/models.md over ranks: loss and every gradient are those of one process."""

import re
from pathlib import Path
from unittest import mock

import pytest
from everyday import one_in

from megatrain.tools.parity import rows
from megatrain.tools.parity.compare import judge
from megatrain.tools.parity.measure import Job, measure
from megatrain.tools.worker_pool import WorkerPool

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def measured(rank: int, world_size: int, layout: rows.Layout, path: str) -> object:
    """Measure as parity does, with the file in place of parity's function."""
    flags = rows.MODELS["own"].split(" --spec ")[0]
    with mock.patch.dict(rows.MODELS, own=f"{flags} --spec {path}:my_spec"):
        return measure(rank, world_size, Job(layout))


@pytest.mark.parametrize("words", one_in(3, ["tp2 pp2", "tp2", "tp2 sp dp2 zero1"]))
def test_the_example_of_the_page_is_the_same_model_on_all_layouts(
    pool: WorkerPool, tmp_path: Path, words: str
) -> None:
    path = tmp_path / "my_layers.py"
    (text,) = (
        t for t in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "def my_spec" in t
    )
    path.write_text(text)
    layout = rows.Layout.of(f"own {words}")
    (reference,) = pool.run(1, measured, layout.alone, str(path))
    verdict = judge(reference, pool.run(layout.world_size, measured, layout, str(path)))
    assert verdict.is_good, verdict
