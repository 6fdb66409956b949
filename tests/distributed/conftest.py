"""A pool of eight ranks shared by all tests in this folder: they run in one xdist process, one after the other."""

from collections.abc import Callable, Iterator

import pytest

from megatrain.tools.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def pool(made_once: Callable[[str], None]) -> Iterator[WorkerPool]:
    made_once("pool")
    with WorkerPool(8, timeout_seconds=300) as made:
        yield made
