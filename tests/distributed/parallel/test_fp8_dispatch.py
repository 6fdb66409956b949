"""--moe-fp8-dispatch: tokens are sent to experts as FP8 codes, and the products of experts do not change by a bit."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from everyday import nightly

from megatrain.kernels.fp8.rows import SCALE_BYTES
from megatrain.parallel import expert_parallel
from megatrain.parallel.collectives import Transfer, begin_all_to_all_into
from megatrain.parallel.grid import RankGroup
from megatrain.tools.parity.measure import Job, Measured, Precision, measure
from megatrain.tools.parity.rows import Layout
from megatrain.tools.worker_pool import WorkerPool


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("dp4 mixtral ep4 hosts", "bf16"),
        nightly("dp2 mixtral ep2 alltoall", "fp64"),
        nightly("dp2 mixtral ep2", "bf16"),
    ],
)
def test_only_the_weight_gradients_of_experts_change(
    pool: WorkerPool, layout: str, precision: Precision
) -> None:
    values, codes = (
        answers(pool, f"{layout} {word}", precision) for word in ("fp8tensorwise", "fp8dispatch")
    )
    for one, other in zip(values, codes, strict=True):
        assert one.losses[0] == other.losses[0]
        assert len(one.gradients) == len(other.gradients)
        for expected, found in zip(one.gradients, other.gradients, strict=True):
            assert found.name == expected.name
            if ".experts." in found.name and expected.values.any():
                far = np.linalg.norm(found.values - expected.values) / np.linalg.norm(expected.values)
                assert 1e-3 < far < 2**-4, "rows are rounded to four bits"
            else:
                assert np.array_equal(found.values, expected.values), found.name


def answers(pool: WorkerPool, words: str, precision: Precision) -> list[Measured]:
    layout = Layout.of(words)
    return pool.run(layout.world_size, measure, Job(layout, precision))


@pytest.mark.parametrize("dispatcher", ["alltoall", "hosts"])
def test_a_row_takes_a_byte_for_each_channel_and_its_scale(pool: WorkerPool, dispatcher: str) -> None:
    """Each layer sends tokens, and gradients of sums, in codes, and as often sums, and gradients of tokens, in fp64."""
    layout = Layout.of(f"dp4 mixtral ep4 {dispatcher} fp8dispatch")
    for sent in pool.run(4, bytes_of_rows, layout):
        values, codes = (sent[dtype] for dtype in (torch.float64, torch.uint8))
        assert len(values) == len(codes) > 0
        assert {8 * (row - SCALE_BYTES) for row in codes} == set(values), (values, codes)


def bytes_of_rows(rank: int, world_size: int, layout: Layout) -> dict[torch.dtype, list[int]]:
    """Return the bytes of a row in each all-to-all of two steps, by dtype."""
    found: dict[torch.dtype, list[int]] = {torch.float64: [], torch.uint8: []}

    def noted(out: torch.Tensor, x: torch.Tensor, group: RankGroup, **sizes: Any) -> Transfer:
        found[x.dtype].append(x.shape[1] * x.element_size())
        return begin_all_to_all_into(out, x, group, **sizes)

    with mock.patch.object(expert_parallel, "begin_all_to_all_into", noted):
        measure(rank, world_size, Job(layout))
    return found
