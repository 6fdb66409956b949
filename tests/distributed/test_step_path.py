"""A step is short to read: the files and lines between its start and its first backward pass are limited."""

from __future__ import annotations

import pytest
from step_path import LAYOUTS, step_path, union_of_ranks

from megatrain.tools.worker_pool import WorkerPool

LIMITS = {"dense, one process": (14, 3000), "all axes": (22, 4500)}
"""Most files, and most lines."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_is_short_to_read(pool: WorkerPool, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    world_size, flags = LAYOUTS[name]
    path = union_of_ranks(pool.run(world_size, step_path, flags))
    text = "\n".join([f"{name}:", *path.lines()])
    with capsys.disabled():
        print(f"\n{text}")
    max_files, max_lines = LIMITS[name]
    assert path.num_files <= max_files, text
    assert path.num_lines <= max_lines, text
    assert "training/engine.py" in path.functions
    assert any("forward" in names for names in path.functions.values())
