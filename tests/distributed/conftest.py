"""A pool of eight ranks shared by the tests of this folder that run in the same xdist process (tests/conftest.py, GROUPS), and scripts."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatrain.tools.worker_pool import WorkerPool

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(8, timeout_seconds=300) as made:
        yield made


@pytest.fixture(scope="module")
def scripts() -> Iterator[tuple[Any, Any]]:
    """The modules that read and shrink recorded command lines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield importlib.import_module("command_lines"), importlib.import_module("shrink_command_line")
