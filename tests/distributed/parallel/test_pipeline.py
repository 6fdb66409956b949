"""Pipelines over gloo: posted receives change no bit, and hide transfers as the simulator computes."""

from __future__ import annotations

import os
import threading
import time
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from test_data_parallel import trained
from torch import Tensor
from torch.autograd import Function

from megatrain.config.schema.pipeline_schedules import ONE_CHUNK, PIPELINE_SCHEDULES, word_of_schedule
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.collectives import Transfer, begin_receive, begin_send
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.pipeline import point_to_point
from megatrain.parallel.pipeline.executor import Executor
from megatrain.parallel.pipeline.point_to_point import connect_channels
from megatrain.parallel.pipeline.schedule import PipelineSchedule, placement_of
from megatrain.parallel.pipeline.segments import SegmentHooks
from megatrain.parallel.pipeline.simulator import StageCosts, simulate
from megatrain.parallel.process_groups import make_group
from megatrain.parallel.rank_lists import GridShape
from megatrain.tools.parity.rows import Layout
from megatrain.tools.worker_pool import WorkerPool

CPU = torch.device("cpu")
PASS_SECONDS, TRANSFER_SECONDS, NUM_MICROBATCHES = 0.02, 0.015, 4


@pytest.mark.parametrize(
    "layout",
    [
        "pp2 dualpipev",
        pytest.param("pp4", marks=pytest.mark.nightly),
        *(
            pytest.param(f"pp2 {word_of_schedule(name)}", marks=pytest.mark.nightly)
            for name in PIPELINE_SCHEDULES
            if name not in (ONE_CHUNK, "dualpipe-v")
        ),
    ],
)
def test_posted_receives_change_no_bit_in_training_and_evaluation(pool: WorkerPool, layout: str) -> None:
    posted, late = Layout.of(f"{layout} batch16"), Layout.of(f"{layout} batch16 noposts")
    found = pool.run(posted.world_size, trained, posted, ())
    for (numbers, state), (others, other_state) in zip(
        found, pool.run(late.world_size, trained, late, ()), strict=True
    ):
        assert numbers == others
        assert all(np.array_equal(a, b) for a, b in zip(state, other_state, strict=True))
    ((alone, _),) = pool.run(1, trained, posted.alone, ())
    assert np.array(found[0][0]) == pytest.approx(np.array(alone), rel=1e-10)


SCHEDULES = [
    PipelineSchedule(name, placement_of(name, 2, traits.num_chunks or 2))
    for name, traits in PIPELINE_SCHEDULES.items()
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: one.kind)
def test_a_step_takes_the_simulated_time_by_the_clocks_of_its_ranks(
    pool: WorkerPool, schedule: PipelineSchedule
) -> None:
    """Passes and messages advance a clock per rank: the executor posts, sends and waits where the simulator does."""
    for posts in (False, True):
        ends = pool.run(2, steps_of, schedule, posts, Clock())
        assert max(max(seconds) for seconds in ends) == pytest.approx(simulated(schedule, posts=posts))
    assert simulated(schedule, posts=True) < simulated(schedule, posts=False)


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: one.kind)
def test_a_slow_network_costs_what_the_simulator_computes(
    pool: WorkerPool, schedule: PipelineSchedule
) -> None:
    """In real time, which needs two cores: passes sleep, and so do transfers, in threads."""
    if os.getloadavg()[0] > 2 * (os.cpu_count() or 1):
        pytest.skip("other work makes the clock late; the test above computes the same without it")

    def fastest(*, posts: bool) -> float:
        runs = (pool.run(2, steps_of, schedule, posts, RealClock())[0] for _ in range(4))
        return min(min(seconds) for seconds in runs)

    measured = {posts: fastest(posts=posts) for posts in (False, True)}
    for posts, seconds in measured.items():
        assert seconds == pytest.approx(simulated(schedule, posts=posts), rel=0.08), f"posts {posts}"
    saved = simulated(schedule, posts=False) - simulated(schedule, posts=True)
    assert measured[False] - measured[True] == pytest.approx(saved, rel=0.3, abs=PASS_SECONDS)


def simulated(schedule: PipelineSchedule, *, posts: bool) -> float:
    """Return the seconds of a step."""
    placement = schedule.placement
    one = PipelineSchedule(schedule.kind, placement, posts_receives=posts)
    times = [PASS_SECONDS] * placement.num_stages
    actions = [one.training(rank, NUM_MICROBATCHES) for rank in range(2)]
    return simulate(actions, StageCosts(times, times, times, TRANSFER_SECONDS), placement).duration


def steps_of(
    rank: int,
    _world_size: int,
    schedule: PipelineSchedule,
    posts: bool,
    clock: Clock,
) -> list[float]:
    """Run three steps of segments that only take time; return their seconds on this rank."""
    placement = schedule.placement
    shape = GridShape(pp=2, num_chunks=placement.num_chunks, is_v=placement.is_v)
    grid = build_grid(shape, rank, make_group)
    connect_channels(grid, CPU)
    stages = [placement.stage(rank, chunk) for chunk in range(placement.num_chunks)]
    executor = Executor(
        [_Segment(clock, is_last=stage == placement.num_stages - 1) for stage in stages],
        grid,
        hidden_shape=(2, 1, 3),
        dtype=torch.float64,
        device=CPU,
        hooks=SegmentHooks(),
        chunks=[range(chunk, chunk + 1) for chunk in range(len(stages))],
        placement=placement,
    )
    one = PipelineSchedule(schedule.kind, placement, posts_receives=posts)
    actions, tokens = one.training(rank, NUM_MICROBATCHES), torch.zeros(1, 2, dtype=torch.int64)
    batch = Batch(tokens=tokens, labels=tokens, loss_mask=torch.ones(1, 2), position_ids=tokens)
    seconds = []
    for _ in range(3):
        torch.distributed.barrier()
        clock.start()
        infos = [PassInfo(microbatch=number) for number in range(NUM_MICROBATCHES)]
        with clock.network():
            executor.run(actions, [batch] * NUM_MICROBATCHES, infos)
        seconds.append(clock.stop())
    return seconds


class Clock:
    """The clock of a rank; passes and messages advance it. A message holds the time at which it was sent."""

    def start(self) -> None:
        self.now = 0.0
        self.free_at: dict[str, float] = {}
        """Arrival of the last message, by group."""

    def stop(self) -> float:
        return self.now

    def run_pass(self) -> None:
        self.now += PASS_SECONDS

    def network(self) -> AbstractContextManager[Any]:
        """Replace the network by one whose messages take TRANSFER_SECONDS once both ranks have posted them."""

        def send(x: Tensor, group: RankGroup, step: int) -> Transfer:
            return begin_send(torch.full_like(x, self.now), group, step)

        def receive(x: Tensor, group: RankGroup, step: int) -> Transfer:
            return _ClockedTransfer(begin_receive(x, group, step), x, group.name, self)

        return mock.patch.multiple(point_to_point, begin_send=send, begin_receive=receive)


class _ClockedTransfer(Transfer):
    def __init__(self, transfer: Transfer, x: Tensor, channel: str, clock: Clock) -> None:
        super().__init__()
        self.transfer, self.x, self.channel, self.clock, self.posted_at = (
            transfer,
            x,
            channel,
            clock,
            clock.now,
        )

    def wait(self) -> None:
        self.transfer.wait()
        free_at = self.clock.free_at
        began = max(self.x[0, 0, 0].item(), self.posted_at, free_at.get(self.channel, 0.0))
        free_at[self.channel] = began + TRANSFER_SECONDS
        self.clock.now = max(self.clock.now, free_at[self.channel])


class RealClock(Clock):
    """Real time."""

    def start(self) -> None:
        self.began = time.perf_counter()

    def stop(self) -> float:
        torch.distributed.barrier()
        return time.perf_counter() - self.began

    def run_pass(self) -> None:
        time.sleep(PASS_SECONDS)

    def network(self) -> AbstractContextManager[Any]:
        def receive(x: Tensor, group: RankGroup, step: int) -> Transfer:
            return _SlowTransfer(begin_receive(x, group, step))

        return mock.patch.object(point_to_point, "begin_receive", receive)


class _SlowTransfer(Transfer):
    """A transfer that ends some time after both ranks have posted it."""

    def __init__(self, transfer: Transfer) -> None:
        super().__init__()
        self._thread = threading.Thread(target=self._run, args=(transfer,))
        self._thread.start()

    def _run(self, transfer: Transfer) -> None:
        transfer.wait()
        time.sleep(TRANSFER_SECONDS)

    def wait(self) -> None:
        self._thread.join()


class _Segment:
    """A segment whose passes only take time."""

    def __init__(self, clock: Clock, *, is_last: bool) -> None:
        self.clock, self.is_last = clock, is_last

    def __call__(self, hidden: Tensor | None, _batch: Batch, info: PassInfo) -> Tensor:
        x = torch.zeros(2, 1, 3, dtype=torch.float64, requires_grad=True) if hidden is None else hidden
        output: Tensor = _Pass.apply(x, info, self.clock)
        return output.sum() if self.is_last else output


class _Pass(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, info: PassInfo, clock: Clock) -> Tensor:
        clock.run_pass()
        ctx.info, ctx.clock = info, clock
        return x + 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.run_pass()
        ctx.info.compute_weight_gradient(ctx.clock.run_pass)
        return grads[0], None, None
