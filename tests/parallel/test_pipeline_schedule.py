"""Schedules run against each other: no deadlock, the bubble and the memory that theory gives."""

import pytest

from megatrain.parallel.pipeline.schedule import (
    Action,
    ActionKind,
    forward_only,
    one_forward_one_backward,
    with_split_backward,
)
from megatrain.parallel.pipeline.simulator import ScheduleError, simulate


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8, 17])
def test_1f1b_has_the_bubble_and_the_peak_of_the_paper(num_stages: int, num_microbatches: int) -> None:
    schedules = [one_forward_one_backward(stage, num_stages, num_microbatches) for stage in range(num_stages)]
    result = simulate(schedules)
    assert result.bubble_fraction == pytest.approx((num_stages - 1) / (num_microbatches + num_stages - 1))
    assert result.peak_activations == tuple(min(num_stages - s, num_microbatches) for s in range(num_stages))


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_each_microbatch_goes_once_through_every_stage(num_stages: int) -> None:
    for stage in range(num_stages):
        actions = with_split_backward(one_forward_one_backward(stage, num_stages, 5))
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT):
            assert [a.microbatch for a in actions if a.kind is kind] == [0, 1, 2, 3, 4]


def test_evaluation_runs_forward_only() -> None:
    schedules = [forward_only(stage, 3, 4) for stage in range(3)]
    assert {action.kind for schedule in schedules for action in schedule} == {
        ActionKind.FORWARD, ActionKind.SEND_FORWARD, ActionKind.RECV_FORWARD,
    }  # fmt: skip
    simulate(schedules)


def test_the_simulator_sees_a_deadlock() -> None:
    schedules = [one_forward_one_backward(0, 2, 2), [Action(ActionKind.RECV_FORWARD, 0)]]
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(schedules)


def test_the_simulator_sees_messages_in_the_wrong_order_and_unread_ones() -> None:
    first = [Action(ActionKind.FORWARD, 0), Action(ActionKind.SEND_FORWARD, 0)]
    with pytest.raises(ScheduleError, match="receives"):
        simulate([first, [Action(ActionKind.RECV_FORWARD, 1)]])
    with pytest.raises(ScheduleError, match="no stage receives"):
        simulate([first, []])
