"""Schedules run against each other: no deadlock, the bubble and the memory that theory gives."""

import random
from dataclasses import replace

import pytest

from megatrain.config.schema.pipeline_schedules import ONE_CHUNK, PIPELINE_SCHEDULES, SEVERAL_CHUNKS
from megatrain.parallel.pipeline.actions import Action, ActionKind, Placement, combined
from megatrain.parallel.pipeline.dualpipe_v import dualpipe_v_passes
from megatrain.parallel.pipeline.schedule import (
    ACTIONS,
    PipelineSchedule,
    forward_only,
    placement_of,
)
from megatrain.parallel.pipeline.simulator import ScheduleError, Simulation, StageCosts, simulate


def of_kind(name: str, ranks: int, chunks: int = 2) -> PipelineSchedule:
    return PipelineSchedule(name, placement_of(name, ranks, PIPELINE_SCHEDULES[name].num_chunks or chunks))


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


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 7])
@pytest.mark.parametrize("combined", [1.0, 0.8])
def test_dualpipe_v_has_the_bubble_and_the_peak_of_its_authors(
    ranks: int, more: int, combined: float
) -> None:
    """Source: DeepSeek, DualPipe, README: (PP / 2 - 1) (F&B + B - 3 W) with PP = 2 * ranks stages, and PP + 1 activations.

    B includes W, and F&B is the time of a combined pass. Exact for equal passes, else an upper bound.
    """
    count, placement = 2 * ranks + more, Placement(ranks, 2, is_v=True)
    schedule = PipelineSchedule("dualpipe-v", placement)
    actions = [schedule.training(rank, count) for rank in range(ranks)]
    ones = [1.0] * (2 * ranks)
    result = simulate(actions, StageCosts(ones, ones, ones, combined=[combined] * len(ones)), placement)
    busy = [sum(span.end - span.start for span in spans) for spans in result.spans]
    bubble = (ranks - 1) * (3 * combined + 2 - 3)
    assert all(result.duration - time <= bubble + 1e-9 for time in busy)
    if combined == 1.0:
        assert result.duration == 6 * count + bubble
    assert max(result.peak_activations) == min(2 * ranks + 1, 2 * count)


def test_dualpipe_v_runs_forward_and_backward_passes_together() -> None:
    """The table at the top of dualpipe_v.py."""

    def text(one: Action) -> str:
        letter = one.kind.value if one.chunk == 0 else one.kind.value.lower()
        return f"{letter}{one.microbatch}"

    rows = [
        " ".join("&".join(map(text, action.passes)) for action in dualpipe_v_passes(rank, 2, 4))
        for rank in range(2)
    ]
    assert rows == [
        "F0 F1 F2 f0 b0 w0 f1 F3&b1 f2&B0 b2 f3&B1 b3 B2 W2 B3 W3",
        "F0 f0 F1 f1 F2 b0 f2&B0 F3&b1 f3&B1 b2 B2 b3 B3 w3 W3",
    ]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_one_stage_combines_all_passes_but_the_first_and_the_last(count: int) -> None:
    actions = PipelineSchedule("1f1b", Placement(1), combines=True).training(0, count)
    passes = [[(one.kind, one.microbatch) for one in action.passes] for action in actions]
    pairs = [[(ActionKind.FORWARD, n + 1), (ActionKind.BACKWARD, n)] for n in range(count - 1)]
    assert passes == [[(ActionKind.FORWARD, 0)], *pairs, [(ActionKind.BACKWARD, count - 1)]]
    assert simulate([actions]).peak_activations == (min(count, 2),)


RANDOM = random.Random(7)
SAMPLES = [
    (RANDOM.randint(2, 12), RANDOM.randint(2, 5), RANDOM.randint(1, 40), RANDOM.randint(0, 9))
    for _ in range(2000)
]


def closed_form(schedule: PipelineSchedule, count: int) -> float | None:
    """Return the duration for passes of 1, free messages and so many micro-batches; None: there is no formula."""
    ranks, chunks = schedule.placement.num_ranks, schedule.placement.num_chunks
    match schedule.kind:
        case "1f1b":
            return 3 * (count + ranks - 1)
        case "interleaved" if count % ranks == 0 and schedule.group_size == ranks:
            return 3 * (chunks * count + ranks - 1)
        case "zb-h1" if count >= ranks:
            return 3 * count + ranks - 1
        case "zb-v" if count >= 2 * ranks:
            return 6 * count + ranks - 1
        case "dualpipe-v" if count >= 2 * ranks:
            return 6 * count + 2 * (ranks - 1)
    return None


def peak_bounds(schedule: PipelineSchedule, count: int) -> list[int]:
    """Return the largest number of passes of chunks between forward and backward, by rank."""
    ranks, chunks = schedule.placement.num_ranks, schedule.placement.num_chunks
    match schedule.kind:
        case "interleaved":
            group = schedule.group_size or ranks
            first = min(group + count % group, count)  # the longest group
            ahead = 1 + schedule.combines
            bounds = [2 * (ranks - 1 - rank) + (chunks - 1) * first + ahead for rank in range(ranks)]
        case "zb-v":
            bounds = [2 * ranks] * ranks
        case "dualpipe-v":
            bounds = [2 * ranks + 1] * ranks
        case "1f1b" | "zb-h1":
            bounds = [ranks - rank for rank in range(ranks)]
        case _:
            bounds = [chunks * count] * ranks
    return [min(bound, chunks * count) for bound in bounds]


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.nightly] * (n > 0)) for n in range(400)]
)
def test_random_numbers_of_ranks_chunks_and_microbatches(number: int) -> None:
    """No deadlock, the duration of the formula, the peak within its bound; the simulator also finds passes that run
    twice, lack their input, or are missing."""
    for ranks, chunks, count, more in SAMPLES[number::400]:
        kinds = [of_kind(name, ranks, chunks) for name in PIPELINE_SCHEDULES]
        schedules = [
            *(replace(one, posts_receives=number % 2 == 0) for one in kinds),
            PipelineSchedule("interleaved", Placement(ranks, chunks), ranks + more * (number % 2)),
            PipelineSchedule("interleaved", Placement(ranks, chunks), ranks + more, combines=True),
        ]
        for schedule in schedules:
            placement = schedule.placement
            result = simulated(schedule, count)
            assert result.duration == (closed_form(schedule, count) or result.duration), schedule
            bounds = peak_bounds(schedule, count)
            pairs = zip(result.peak_activations, bounds, strict=True)
            assert all(peak <= bound for peak, bound in pairs), (schedule, count)
            simulate([schedule.evaluation(rank, count) for rank in range(ranks)], placement=placement)
            for rank in (0, ranks - 1):
                passes = [one for action in schedule.training(rank, count) for one in action.passes]
                for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
                    assert sum(one.kind is kind for one in passes) == count * placement.num_chunks


ALL_KINDS = [of_kind(name, 4) for name in PIPELINE_SCHEDULES]


def test_every_schedule_has_actions() -> None:
    assert PIPELINE_SCHEDULES.keys() == ACTIONS.keys()
    assert PIPELINE_SCHEDULES[ONE_CHUNK].num_chunks == 1
    assert PIPELINE_SCHEDULES[SEVERAL_CHUNKS].num_chunks is None


@pytest.mark.parametrize("name", PIPELINE_SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_a_schedule_says_of_itself_is_true_of_its_actions(name: str, ranks: int) -> None:
    traits, schedule, count = PIPELINE_SCHEDULES[name], of_kind(name, ranks), 4 * ranks
    chunks = schedule.placement.num_chunks
    result = simulated(schedule, count)
    waiting = result.duration - 3 * chunks * count
    assert waiting == pytest.approx((traits.bubble or 1 / chunks) * 3 * chunks * (ranks - 1))
    if traits.in_flight is not None:
        planned = [traits.in_flight(ranks, rank, chunks, count) * chunks for rank in range(ranks)]
        assert planned[0] == result.peak_activations[0]
        assert all(a >= b for a, b in zip(planned, result.peak_activations, strict=True))

    def actions(one: PipelineSchedule) -> list[Action]:
        return [action for rank in range(ranks) for action in one.training(rank, count)]

    kinds = {one.kind for action in actions(schedule) for one in action.passes}
    assert (ActionKind.WEIGHT in kinds) == traits.splits_backward
    combining = actions(replace(schedule, combines=True))
    assert any(len(action.passes) > 1 for action in combining) == traits.overlaps_passes
    assert (actions(replace(schedule, group_size=2 * ranks)) != actions(schedule)) == traits.has_groups


@pytest.mark.parametrize("schedule", ALL_KINDS, ids=lambda one: one.kind)
def test_receives_are_posted_one_pass_ahead(schedule: PipelineSchedule) -> None:
    """The other actions, and the order of the receives of each direction, stay the same."""
    received = {
        ActionKind.POST_FORWARD: ActionKind.RECV_FORWARD,
        ActionKind.POST_BACKWARD: ActionKind.RECV_BACKWARD,
    }
    for rank in range(4):
        plain = replace(schedule, posts_receives=False).training(rank, 9)
        posted = schedule.training(rank, 9)
        assert [action for action in posted if action.kind not in received] == plain
        for post, receive in received.items():
            orders = [[(a.microbatch, a.chunk) for a in posted if a.kind is kind] for kind in (post, receive)]
            assert orders[0] == orders[1]
        positions = {(a.kind, a.microbatch, a.chunk): n for n, a in enumerate(posted)}
        for (kind, *which), position in positions.items():
            if kind in received:
                between = posted[position : positions[received[kind], *which]]
                assert sum(bool(action.passes) for action in between) <= 1
                assert (
                    position == 0
                    or any(action.passes for action in between)
                    or not any(action.passes for action in posted[:position])
                )


@pytest.mark.parametrize("schedule", ALL_KINDS, ids=lambda one: one.kind)
def test_posted_receives_hide_transfers(schedule: PipelineSchedule) -> None:
    """A transfer begins when both ranks have posted it; without posts ahead every one of them is waited for."""
    placement, count = schedule.placement, 12
    times = [1 / placement.num_chunks] * placement.num_stages

    def duration(transfer: float, one: PipelineSchedule) -> float:
        actions = [one.training(rank, count) for rank in range(4)]
        return simulate(actions, StageCosts(times, times, times, transfer), placement).duration

    free = duration(0.0, schedule)
    late, early = duration(0.2, replace(schedule, posts_receives=False)), duration(0.2, schedule)
    assert duration(0.0, replace(schedule, posts_receives=False)) == free
    assert free < early < late


def test_the_simulator_sees_posts_in_another_order_than_receives() -> None:
    first = [Action(kind, n) for n in range(2) for kind in (ActionKind.FORWARD, ActionKind.SEND_FORWARD)]
    second = [Action(ActionKind.POST_FORWARD, 1), Action(ActionKind.RECV_FORWARD, 0)]
    with pytest.raises(ScheduleError, match="expects"):
        simulate([first, second])


def test_the_simulator_sees_a_post_that_is_never_received() -> None:
    first = [Action(ActionKind.FORWARD, 0), Action(ActionKind.SEND_FORWARD, 0)]
    with pytest.raises(ScheduleError, match="no rank receives"):
        simulate([first, [Action(ActionKind.POST_FORWARD, 0)]])


def test_passes_of_a_micro_batch_do_not_run_together() -> None:
    forward, backward = Action(ActionKind.FORWARD, 0), Action(ActionKind.BACKWARD, 0)
    with pytest.raises(ScheduleError, match="runs before its forward pass"):
        simulate([[combined(forward, backward)]])


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
        actions = PipelineSchedule(ONE_CHUNK, Placement(num_stages)).training(stage, 5)
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            assert [a.microbatch for a in actions if a.kind is kind] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("placement", [Placement(3), Placement(3, 2), Placement(3, 2, is_v=True)])
def test_evaluation_runs_forward_only(placement: Placement) -> None:
    schedules = [forward_only(rank, placement, 4) for rank in range(3)]
    assert {action.kind for schedule in schedules for action in schedule} == {
        ActionKind.FORWARD, ActionKind.SEND_FORWARD, ActionKind.RECV_FORWARD,
    }  # fmt: skip
    simulate(schedules, placement=placement)


@pytest.mark.parametrize("kind", [name for name, traits in PIPELINE_SCHEDULES.items() if traits.is_v])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_the_first_segments_weight_gradient_is_the_last_of_its_microbatch(kind: str, count: int) -> None:
    """Rank 0 of a V has the embedding and the head, which may share a weight."""
    actions = PipelineSchedule(kind, Placement(4, 2, is_v=True)).training(0, count)
    passes = [one for action in actions for one in action.passes if one.kind is not ActionKind.FORWARD]
    for microbatch in range(count):
        own = [one.chunk for one in passes if one.microbatch == microbatch]
        assert own.index(0) > own.index(1)
        assert own[-1] == 0


def test_the_simulator_sees_a_deadlock() -> None:
    schedules = [
        PipelineSchedule(ONE_CHUNK, Placement(2)).training(0, 2),
        [Action(ActionKind.RECV_FORWARD, 0)],
    ]
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(schedules)


def test_too_small_groups_deadlock() -> None:
    """The rule on --microbatch-group-size-per-virtual-pipeline-stage refuses them."""
    schedule = PipelineSchedule(SEVERAL_CHUNKS, Placement(4, 2), group_size=1)
    with pytest.raises(ScheduleError, match="deadlock"):
        simulated(schedule, 8)


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


@pytest.mark.parametrize("name", PIPELINE_SCHEDULES)
def test_one_stage_has_every_schedule(name: str) -> None:
    """A chunk's passes alone: the stage has no second one."""
    actions = PipelineSchedule(name, placement_of(name, 1, 1)).training(0, 4)
    assert {one.chunk for action in actions for one in action.passes} == {0}
    simulate([actions])
