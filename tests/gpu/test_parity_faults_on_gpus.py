"""Parity finds the planted faults on GPUs, over NCCL; all of them need four.

pytest --nightly tests/gpu/test_parity_faults_on_gpus.py
"""

from collections.abc import Iterator

import pytest
import torch
from parity_faults import FAULTS, measured_with

from megatrain.tools.parity.cli import Comparer
from megatrain.tools.parity.rows import Layout
from megatrain.tools.worker_pool import WorkerPool

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs several GPUs"),
]


@pytest.fixture(scope="module")
def comparer() -> Iterator[Comparer]:
    with WorkerPool(min(torch.cuda.device_count(), 8), device="cuda", timeout_seconds=600) as pool:
        yield Comparer(pool)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(comparer: Comparer, fault: str) -> None:
    layout = Layout.of(FAULTS[fault].layout)
    if layout.world_size > comparer.pool.size:
        pytest.skip(f"needs {layout.world_size} GPUs")
    assert comparer.compare(layout).is_good, "it fails without the fault"
    assert not comparer.compare(layout, run=measured_with(fault)).is_good
