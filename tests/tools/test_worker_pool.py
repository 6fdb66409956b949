"""Workers on GPUs keep the world group and its subgroups across jobs (CPUs: tests/distributed/parity/test_parity.py)."""

from collections.abc import Sequence

import pytest
import torch.distributed as dist

from megatrain.tools import worker_pool
from megatrain.tools.worker_pool import kept_group

HALVES = [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("backend", "created"),
    [("nccl", ["tp", "dp", "messages", "messages"]), ("gloo", ["tp", "dp", "messages"] * 2)],
)
def test_a_group_of_a_kept_world_is_created_once(
    monkeypatch: pytest.MonkeyPatch, backend: str, created: list[str]
) -> None:
    names: list[str] = []

    def make(name: str, _lists: Sequence[Sequence[int]]) -> object:
        names.append(name)
        return object()

    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(worker_pool, "make_group", make)
    worker_pool._first_group.cache_clear()
    asked = ["tp", "dp", "messages"]
    first, second = ([kept_group(name, HALVES) for name in asked] for _ in range(2))
    assert names == created
    assert [a is b for a, b in zip(first, second, strict=True)] == [backend == "nccl"] * 2 + [False]
    worker_pool._first_group.cache_clear()
