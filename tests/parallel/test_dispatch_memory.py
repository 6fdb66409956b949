"""Rows of experts have no memory while sums of them are sent: there are as many as assignments, and fewer sums."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.kernels.moe.routing import Routing
from megatrain.parallel import expert_parallel
from megatrain.parallel.collectives import Transfer
from megatrain.parallel.expert_parallel import AllToAllDispatcher
from megatrain.parallel.grid import RankGroup


@pytest.mark.parametrize("in_fp8", [False, True])
def test_rows_are_freed_before_their_sums_are_sent(in_fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[weakref.ref[Tensor]] = []
    found: list[bool] = []

    def send(out: Tensor, x: Tensor, _group: RankGroup, **_sizes: Any) -> Transfer:
        found.append(any(one() is not None for one in watched))
        out.copy_(x)
        return Transfer()

    monkeypatch.setattr(expert_parallel, "begin_all_to_all_into", send)
    ep, etp = RankGroup("ep", (0,), 0), RankGroup("etp", (0,), 0)
    dispatcher = AllToAllDispatcher(4, ep, etp, steps=(ep,), in_fp8=in_fp8)
    x = torch.randn(8, 16, requires_grad=True)
    experts = torch.tensor([[0, 1], [2, 3]] * 4)
    dispatched = dispatcher.begin_dispatch(x, lambda: Routing(experts, torch.full((8, 2), 0.5)))()
    finish = dispatcher.begin_combine(_outputs(dispatched.rows, watched), dispatched)
    out = finish()
    assert found == [False, False], "the rows of the forward pass"
    dispatched.rows.register_hook(lambda drows: watched.append(weakref.ref(drows)))
    out.sum().backward()
    assert found == [False] * 4, "their gradients"
    assert len(watched) == 2


def _outputs(rows: Tensor, watched: list[weakref.ref[Tensor]]) -> Tensor:
    out = rows * 0.5
    watched.append(weakref.ref(out))
    return out
