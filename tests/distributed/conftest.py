"""One pool of eight ranks for all tests in this folder: they run in one process of xdist, one after the other."""

from collections.abc import Iterator

import pytest

from megatrain.tools.worker_pool import WorkerPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/distributed" in str(item.path):
            item.add_marker(pytest.mark.xdist_group("distributed"))


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(8, timeout_seconds=90) as made:
        yield made
