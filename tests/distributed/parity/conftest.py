"""The comparers of parity, which share the pool of ranks and keep their references."""

import pytest

from megatrain.tools.parity.cli import Comparer
from megatrain.tools.parity.low_precision import LowPrecisionComparer
from megatrain.tools.parity.measure import LOW_PRECISIONS, Job, Measured, Precision
from megatrain.tools.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def comparer(pool: WorkerPool) -> Comparer:
    return Comparer(pool)


@pytest.fixture(scope="session")
def low_precision(pool: WorkerPool) -> dict[Precision, LowPrecisionComparer]:
    answers: dict[Job, list[Measured]] = {}
    return {precision: LowPrecisionComparer(pool, precision, answers=answers) for precision in LOW_PRECISIONS}
