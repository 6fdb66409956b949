"""The order in which the executor runs segments, and which passes compute gradients."""

from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.parallel.batch import PassInfo
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.pipeline.actions import Action, ActionKind, combined
from megatrain.parallel.pipeline.executor import Executor, LateGradients, segment_passes
from megatrain.parallel.pipeline.segments import SegmentPass

FORWARD, BACKWARD, WEIGHT = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT
CHUNKS = [range(3), range(3, 5)]


def test_a_combined_action_alternates_between_its_passes() -> None:
    actions = [combined(Action(FORWARD, 1, 0), Action(BACKWARD, 0, 1))]
    assert [(one.kind, one.segment) for one in segment_passes(actions, CHUNKS)] == [
        (BACKWARD, 4), (FORWARD, 0), (BACKWARD, 3), (FORWARD, 1), (FORWARD, 2),
    ]  # fmt: skip


def test_a_heads_forward_pass_computes_gradients_unless_they_are_deferred() -> None:
    """Micro-batch 0 has a whole backward pass, 1 defers weight gradients, 2 is only evaluated."""
    actions = [
        *(Action(FORWARD, number, 1) for number in range(3)),
        *(Action(BACKWARD, number, 1) for number in range(2)),
        Action(WEIGHT, 1, 1),
    ]
    passes = segment_passes(actions, CHUNKS, head=4)
    forward = [one for one in passes if one.kind is FORWARD]
    assert [one for one in forward if one.computes_gradients] == [SegmentPass(FORWARD, 4)]
    assert passes.index(SegmentPass(FORWARD, 4)) == 1  # of micro-batch 0
    assert all(one.computes_gradients for one in passes if one.kind is not FORWARD)


class Segment(Function):
    """A segment whose weight gradient may be late."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, info: PassInfo, name: str, events: list[str]) -> Tensor:
        ctx.info, ctx.name, ctx.events = info, name, events
        return hidden.sum() if name == "head" else hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.events.append(f"{ctx.name} dx")
        ctx.info.compute_weight_gradient(lambda: ctx.events.append(f"{ctx.name} dW"), may_be_late=True)
        return grads[0].expand(1, 1, 1), None, None, None


@pytest.mark.parametrize("late_gradients", get_args(LateGradients))
def test_late_gradients_are_complete_before_the_hooks_read_them(late_gradients: LateGradients) -> None:
    events: list[str] = []

    class Hooks:
        def on_schedule(self, passes: Any) -> None: ...
        def before(self, segment_pass: SegmentPass) -> None: ...
        def after(self, segment_pass: SegmentPass) -> None: ...
        def on_gradients(self, segment: int, *, is_last: bool) -> None:
            if is_last:
                events.append(f"{('layer', 'head')[segment]} ready")

    weight = torch.ones(1, 1, 1, requires_grad=True)
    executor = Executor(
        [
            lambda _hidden, _batch, info: Segment.apply(weight, info, "layer", events),
            lambda hidden, _batch, info: Segment.apply(hidden, info, "head", events),
        ],
        SimpleNamespace(pp=RankGroup("pp", (0,), 0), channels={}),
        hidden_shape=(1, 1, 1),
        dtype=torch.float32,
        device=torch.device("cpu"),
        hooks=Hooks(),
        late_gradients=late_gradients,
    )
    actions = [Action(kind, number, 0) for number in range(2) for kind in (FORWARD, BACKWARD)]
    executor.run(actions, [None, None], [PassInfo(microbatch=number) for number in range(2)])
    first = ["head dx", "head dW", "layer dx", "layer dW"]
    if late_gradients != "none":
        first = ["head dx", "layer dx", "head dW", "layer dW"]
    last = ["head dx", "head dW", "head ready", "layer dx", "layer dW", "layer ready"]
    if late_gradients == "all":  # the hooks read none
        last = ["head dx", "head ready", "layer dx", "layer ready", "head dW", "layer dW"]
    assert events == first + last
