"""A transfer of rows overlaps the work between its begin and its end, in both directions."""

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.parallel.batch import PassInfo
from megatrain.parallel.collectives import Transfer
from megatrain.parallel.expert_parallel import RowTransfer


class Work:
    """Work in flight that records its wait."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def wait(self) -> None:
        self.events.append(f"wait for {self.name}")


class Recorded(Function):
    """Another operation on the tokens."""

    @staticmethod
    def forward(ctx, x: Tensor, events: list[str]) -> Tensor:
        ctx.events = events
        events.append("other work")
        return x.clone()

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.events.append("its gradient")
        return grads[0], None


def test_both_passes_begin_before_other_work_and_wait_after_it() -> None:
    events: list[str] = []

    def sent(name: str, factor: float):
        def begin(x: Tensor) -> tuple[Tensor, Transfer]:
            events.append(f"begin {name}")
            return x * factor, Transfer(Work(name, events))

        return begin

    x = torch.ones(2, 3, requires_grad=True)
    transfer = RowTransfer(sent("rows", 2), sent("gradient", 5))
    own = transfer.begin(x)
    other = Recorded.apply(x, events)
    rows = transfer.finish(own)
    transfer.deferred.append(lambda: events.append("deferred"))
    total = (rows + other).sum()
    assert events == ["begin rows", "other work", "wait for rows"]
    events.clear()
    total.backward()
    assert events == ["begin gradient", "deferred", "its gradient", "wait for gradient"]
    assert torch.equal(rows, 2 * torch.ones(2, 3))
    assert torch.equal(x.grad, 6 * torch.ones(2, 3))


def test_the_newest_late_weight_gradients_overlap_with_the_gradient() -> None:
    events: list[str] = []
    info = PassInfo(late=[])
    for name in ("oldest", "newer", "newest"):
        info.compute_weight_gradient(lambda name=name: events.append(name), may_be_late=True)
    info.compute_weight_gradient(lambda: events.append("not late"))
    assert events == ["oldest", "not late"]

    def sent(x: Tensor) -> tuple[Tensor, Transfer]:
        events.append("begin")
        return x, Transfer(Work("rows", events))

    transfer = RowTransfer(sent, sent, deferred=[info.compute_late])
    rows = transfer.finish(transfer.begin(torch.ones(2, 3, requires_grad=True)))
    events.clear()
    rows.sum().backward()
    assert events == ["begin", "newer", "newest", "wait for rows"]
    info.compute_late()
    assert len(events) == 4


def test_appended_columns_are_received_without_a_gradient() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    transfer = RowTransfer(
        lambda x: (torch.cat((x, 7 + torch.zeros(2, 1)), dim=1), Transfer()), lambda dy: (dy, Transfer())
    )
    rows = transfer.finish(transfer.begin(x))
    rows.sum().backward()
    assert torch.equal(transfer.appended, torch.full((2, 1), 7.0))
    assert torch.equal(x.grad, torch.ones(2, 3))
