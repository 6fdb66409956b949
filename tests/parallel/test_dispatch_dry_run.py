"""A dry run: every dispatcher makes tensors of the sizes of an even load."""

import pytest
import torch

from megatrain.kernels.moe.routing import Routing
from megatrain.parallel.expert_parallel import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    LocalDispatcher,
)
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.rank_capacity import RankCapacity


@pytest.mark.parametrize(
    ("kind", "ep", "etp", "rows", "own_experts"),
    [
        ("local", 1, 1, 24, 8),
        ("allgather", 2, 1, 48, 4),  # all possible assignments: three of each of 16 tokens
        ("allgather", 4, 2, 128, 2),
        ("bounded", 4, 2, 80, 2),  # 1.5 times the even load of 48, a multiple of 16
        ("bounded", 2, 1, 48, 4),
        ("alltoall", 2, 1, 24, 4),
        ("alltoall", 4, 2, 48, 2),
        ("hosts", 4, 2, 48, 2),
    ],
)
def test_rows_on_the_meta_device_are_those_of_an_even_load(
    kind: str, ep: int, etp: int, rows: int, own_experts: int
) -> None:
    groups = [RankGroup(name, tuple(range(size)), 0) for name, size in (("ep", ep), ("etp", etp))]
    steps = tuple(RankGroup(name, (0, 1), 0) for name in ("ep_peers", "ep_host"))
    dispatcher = {
        "local": lambda: LocalDispatcher(8),
        "allgather": lambda: AllGatherDispatcher(8, *groups),
        "bounded": lambda: AllGatherDispatcher(8, *groups, capacity=RankCapacity(1.5 if ep == 4 else 9)),
        "alltoall": lambda: AllToAllDispatcher(8, *groups, steps=groups[:1]),
        "hosts": lambda: AllToAllDispatcher(8, *groups, steps=steps),
    }[kind]()
    x = torch.empty(8, 16, device="meta", requires_grad=True)
    weights = torch.empty(8, 3, device="meta", requires_grad=True)
    dispatched = dispatcher.begin_dispatch(
        x, lambda: Routing(torch.empty(8, 3, dtype=torch.int64, device="meta"), weights)
    )()
    assert dispatched.rows.shape == (rows, 16)
    assert dispatched.probs.shape == (rows,)
    assert dispatched.ends.shape == (own_experts,)
    out = dispatcher.begin_combine(dispatched.rows * dispatched.probs[:, None], dispatched)()
    assert out.shape == x.shape
    out.sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
