"""Gradients that a layer's GEMM overwrites: no memory is read that was not written."""

from __future__ import annotations

import pytest
import torch

from megatrain.kernels.linear import FirstWrite
from megatrain.parallel.data_parallel import BucketMemory, GradientReduction


def test_memory_of_a_micro_batch_has_zeros_where_no_gradient_came(monkeypatch: pytest.MonkeyPatch) -> None:
    writes = [FirstWrite(), FirstWrite()]
    memory = BucketMemory(torch.float64, torch.device("cpu"))
    parts = [(writes[0], slice(4, 12)), (writes[1], slice(16, 36))]
    memory.add(40, slice(0, 20), is_kept_full=False, overwritten=parts)
    memory.free(0)
    reduction = GradientReduction(memory, [], overlap=True, dtype=torch.float64)
    monkeypatch.setattr(reduction, "_begin", lambda _number, is_last: None)
    allocate = memory.allocate

    def allocate_undefined(number: int) -> None:
        allocate(number)
        memory.full[number].fill_(torch.nan)

    monkeypatch.setattr(memory, "allocate", allocate_undefined)
    for microbatch in (0, 1):
        reduction.prepare(0)
        is_undefined = memory.full[0].isnan()
        assert is_undefined[4:12].all()
        assert is_undefined[16:36].all()
        assert is_undefined.sum() == 8 + 20, "the rest is added to"
        assert [writes[0].take() for _ in range(2)] == [True, False]
        memory.full[0][4:12] = 3
        reduction.mark_ready(0, is_last=microbatch == 1)
        expected = torch.zeros(40, dtype=torch.float64)
        expected[4:12] = 3
        assert torch.equal(memory.full[0], expected)
        memory.free(0)


def test_memory_of_a_step_is_overwritten_once() -> None:
    write = FirstWrite()
    memory = BucketMemory(torch.float64, torch.device("cpu"))
    memory.add(8, slice(0, 4), is_kept_full=True, overwritten=[(write, slice(0, 8))])
    assert [write.take() for _ in range(3)] == [True, False, False]
    memory.zero()
    assert write.take()
