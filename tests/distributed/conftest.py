"""A pool of eight ranks shared by the tests of this folder that run in the same xdist process (tests/conftest.py, GROUPS)."""

from collections.abc import Iterator

import pytest

from megatrain.tools.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(8, timeout_seconds=300) as made:
        yield made
