"""The order in which the executor runs segments, and which passes compute gradients."""

from megatrain.parallel.pipeline.actions import Action, ActionKind, combined
from megatrain.parallel.pipeline.executor import segment_passes
from megatrain.parallel.pipeline.segments import SegmentPass

FORWARD, BACKWARD, WEIGHT = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT
CHUNKS = [range(3), range(3, 5)]


def test_a_combined_action_alternates_between_its_passes() -> None:
    actions = [combined(Action(FORWARD, 1, 0), Action(BACKWARD, 0, 1))]
    assert [(one.kind, one.segment) for one in segment_passes(actions, CHUNKS)] == [
        (FORWARD, 0), (BACKWARD, 4), (FORWARD, 1), (BACKWARD, 3), (FORWARD, 2),
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
