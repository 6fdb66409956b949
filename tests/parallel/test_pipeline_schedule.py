"""Schedules run against each other: no deadlock, the bubble and the memory that theory gives."""

import random

import pytest

from megatrain.parallel.pipeline.actions import Action, ActionKind, Placement
from megatrain.parallel.pipeline.schedule import (
    PipelineSchedule,
    forward_only,
    interleaved,
    one_forward_one_backward,
    with_split_backward,
    zero_bubble,
)
from megatrain.parallel.pipeline.simulator import ScheduleError, Simulation, simulate


def simulated(schedule: PipelineSchedule, num_microbatches: int) -> Simulation:
    placement = schedule.placement
    ranks = [schedule.training(rank, num_microbatches) for rank in range(placement.num_ranks)]
    return simulate(ranks, placement=placement)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8, 17])
def test_1f1b_has_the_bubble_and_the_peak_of_the_paper(num_stages: int, num_microbatches: int) -> None:
    result = simulated(PipelineSchedule("1f1b", Placement(num_stages)), num_microbatches)
    assert result.bubble_fraction == pytest.approx((num_stages - 1) / (num_microbatches + num_stages - 1))
    assert result.peak_activations == tuple(min(num_stages - s, num_microbatches) for s in range(num_stages))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_interleaving_divides_the_bubble_by_the_number_of_chunks(
    ranks: int, chunks: int, groups: int
) -> None:
    """Source: Narayanan et al., section 2.2: (p - 1) / (v m + p - 1)."""
    count = groups * ranks
    result = simulated(PipelineSchedule("interleaved", Placement(ranks, chunks)), count)
    assert result.bubble_fraction == pytest.approx((ranks - 1) / (chunks * count + ranks - 1))
    bound = [2 * (ranks - 1 - rank) + (chunks - 1) * ranks + 1 for rank in range(ranks)]
    assert all(peak <= most for peak, most in zip(result.peak_activations, bound, strict=True))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("factor", [1, 2, 5])
def test_zero_bubble_schedules_wait_only_at_start_and_end(ranks: int, factor: int) -> None:
    """Source: Qi et al., arXiv:2401.10241, table 1, for equal costs: p - 1 units, with the peak memory of 1F1B."""
    count = factor * ranks
    one = simulated(PipelineSchedule("zb-h1", Placement(ranks)), count)
    assert one.duration == 3 * count + ranks - 1
    assert one.peak_activations == tuple(range(ranks, 0, -1))
    two = simulated(PipelineSchedule("zb-v", Placement(ranks, 2, is_v=True)), count)
    assert two.duration == 6 * count + ranks - 1
    assert max(two.peak_activations) <= 2 * ranks


RANDOM = random.Random(7)
SAMPLES = [
    (RANDOM.randint(2, 12), RANDOM.randint(2, 5), RANDOM.randint(1, 40), RANDOM.randint(0, 9))
    for _ in range(2000)
]


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.nightly] * (n > 0)) for n in range(20)]
)
def test_no_numbers_of_ranks_chunks_and_microbatches_deadlock(number: int) -> None:
    """The simulator also finds passes that run twice, lack their input, or are missing."""
    for ranks, chunks, count, more in SAMPLES[number::20]:
        schedules = [
            PipelineSchedule("1f1b", Placement(ranks)),
            PipelineSchedule("interleaved", Placement(ranks, chunks), ranks + more),
            PipelineSchedule("zb-h1", Placement(ranks)),
            PipelineSchedule("zb-v", Placement(ranks, 2, is_v=True)),
        ]
        for schedule in schedules:
            placement = schedule.placement
            result = simulated(schedule, count)
            # The most units of work that a rank can hold: all micro-batches of all chunks.
            assert max(result.peak_activations) <= count * placement.num_chunks
            simulate([schedule.evaluation(rank, count) for rank in range(ranks)], placement=placement)
            for rank in (0, ranks - 1):
                actions = schedule.training(rank, count)
                for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
                    assert sum(action.kind is kind for action in actions) == count * placement.num_chunks


@pytest.mark.parametrize(
    "placement", [Placement(3), Placement(3, 2), Placement(4, 3), Placement(3, 2, is_v=True)]
)
def test_each_virtual_stage_has_one_rank(placement: Placement) -> None:
    found = {
        placement.stage(rank, chunk): rank
        for rank in range(placement.num_ranks)
        for chunk in range(placement.num_chunks)
    }
    assert found == {stage: placement.rank(stage) for stage in range(placement.num_stages)}
    heads = [rank for rank in range(placement.num_ranks) if placement.has_head(rank)]
    assert heads == [0 if placement.is_v else placement.num_ranks - 1]


def test_a_v_sends_nothing_at_its_turn() -> None:
    """The last rank has two consecutive virtual stages."""
    actions = forward_only(1, Placement(2, 2, is_v=True), 1)
    assert [(action.kind, action.chunk) for action in actions] == [
        (ActionKind.RECV_FORWARD, 0), (ActionKind.FORWARD, 0), (ActionKind.FORWARD, 1), (ActionKind.SEND_FORWARD, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_each_microbatch_goes_once_through_every_stage(num_stages: int) -> None:
    for stage in range(num_stages):
        actions = with_split_backward(one_forward_one_backward(stage, num_stages, 5))
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT):
            assert [a.microbatch for a in actions if a.kind is kind] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("placement", [Placement(3), Placement(3, 2), Placement(3, 2, is_v=True)])
def test_evaluation_runs_forward_only(placement: Placement) -> None:
    schedules = [forward_only(rank, placement, 4) for rank in range(3)]
    assert {action.kind for schedule in schedules for action in schedule} == {
        ActionKind.FORWARD, ActionKind.SEND_FORWARD, ActionKind.RECV_FORWARD,
    }  # fmt: skip
    simulate(schedules, placement=placement)


def test_the_first_segments_weight_gradient_is_the_last_of_its_microbatch() -> None:
    """Rank 0 of a V has the embedding and the head, which may share a weight."""
    actions = zero_bubble(0, Placement(4, 2, is_v=True), 9)
    for microbatch in range(9):
        own = [a.chunk for a in actions if a.kind is ActionKind.WEIGHT and a.microbatch == microbatch]
        assert own == [1, 0]


def test_the_simulator_sees_a_deadlock() -> None:
    schedules = [one_forward_one_backward(0, 2, 2), [Action(ActionKind.RECV_FORWARD, 0)]]
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(schedules)


def test_too_small_groups_deadlock() -> None:
    """The rule on --microbatch-group-size-per-virtual-pipeline-stage refuses them."""
    placement = Placement(4, 2)
    schedules = [interleaved(rank, placement, 8, group_size=1) for rank in range(4)]
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(schedules, placement=placement)


def test_the_simulator_sees_messages_in_the_wrong_order_and_unread_ones() -> None:
    first = [Action(ActionKind.FORWARD, 0), Action(ActionKind.SEND_FORWARD, 0)]
    with pytest.raises(ScheduleError, match="receives"):
        simulate([first, [Action(ActionKind.RECV_FORWARD, 1)]])
    with pytest.raises(ScheduleError, match="no rank receives"):
        simulate([first, []])


@pytest.mark.parametrize(
    "actions",
    [
        [Action(ActionKind.BACKWARD, 0), Action(ActionKind.FORWARD, 0)],
        [Action(ActionKind.FORWARD, 0), Action(ActionKind.FORWARD, 0)],
        [Action(ActionKind.FORWARD, 0), Action(ActionKind.WEIGHT, 0)],
    ],
)
def test_the_simulator_sees_a_pass_without_its_input(actions: list[Action]) -> None:
    with pytest.raises(ScheduleError, match="runs"):
        simulate([actions])
