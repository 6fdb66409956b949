"""Pipelines over gloo: posted receives change no bit, and hide transfers as the simulator computes."""

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from test_data_parallel import trained
from torch import Tensor
from torch.autograd import Function

from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.collectives import Transfer, begin_receive
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.pipeline import point_to_point
from megatrain.parallel.pipeline.actions import Placement
from megatrain.parallel.pipeline.executor import Executor, SegmentPass
from megatrain.parallel.pipeline.point_to_point import connect_channels
from megatrain.parallel.pipeline.schedule import PipelineSchedule
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
        "pp4",
        "pp2 dualpipev",
        *(pytest.param(one, marks=pytest.mark.nightly) for one in ("pp2 interleaved", "pp4 zbh1", "pp2 zbv")),
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


@pytest.mark.parametrize(
    "schedule",
    [
        PipelineSchedule("interleaved", Placement(2, 2)),
        pytest.param(PipelineSchedule("1f1b", Placement(2)), marks=pytest.mark.nightly),
        pytest.param(PipelineSchedule("zb-h1", Placement(2)), marks=pytest.mark.nightly),
        pytest.param(PipelineSchedule("zb-v", Placement(2, 2, is_v=True)), marks=pytest.mark.nightly),
        pytest.param(PipelineSchedule("dualpipe-v", Placement(2, 2, is_v=True)), marks=pytest.mark.nightly),
    ],
    ids=lambda one: one.kind,
)
def test_a_slow_network_costs_what_the_simulator_computes(
    pool: WorkerPool, schedule: PipelineSchedule
) -> None:
    measured = {posts: min(pool.run(2, steps_of, schedule, posts)[0]) for posts in (False, True)}
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


def steps_of(rank: int, _world_size: int, schedule: PipelineSchedule, posts: bool) -> list[float]:
    """Run three steps of segments that sleep; return their seconds."""
    placement = schedule.placement
    shape = GridShape(pp=2, num_chunks=placement.num_chunks, is_v=placement.is_v)
    grid = build_grid(shape, rank, make_group)
    connect_channels(grid, CPU)
    stages = [placement.stage(rank, chunk) for chunk in range(placement.num_chunks)]
    executor = Executor(
        [_Sleeping(is_last=stage == placement.num_stages - 1) for stage in stages],
        grid,
        hidden_shape=(2, 1, 3),
        dtype=torch.float32,
        device=CPU,
        hooks=_NoHooks(),
        chunks=[range(chunk, chunk + 1) for chunk in range(len(stages))],
        placement=placement,
    )
    one = PipelineSchedule(schedule.kind, placement, posts_receives=posts)
    actions, tokens = one.training(rank, NUM_MICROBATCHES), torch.zeros(1, 2, dtype=torch.int64)
    batch = Batch(tokens=tokens, labels=tokens, loss_mask=torch.ones(1, 2), position_ids=tokens)
    seconds = []
    with _slow_network():
        for _ in range(3):
            torch.distributed.barrier()
            began = time.perf_counter()
            infos = [PassInfo(microbatch=number) for number in range(NUM_MICROBATCHES)]
            executor.run(actions, [batch] * NUM_MICROBATCHES, infos)
            torch.distributed.barrier()
            seconds.append(time.perf_counter() - began)
    return seconds


class _Sleeping:
    """A segment whose passes sleep."""

    def __init__(self, *, is_last: bool) -> None:
        self.is_last = is_last

    def __call__(self, hidden: Tensor | None, _batch: Batch, info: PassInfo) -> Tensor:
        x = torch.zeros(2, 1, 3, requires_grad=True) if hidden is None else hidden
        output: Tensor = _Sleep.apply(x, info)
        return output.sum() if self.is_last else output


class _Sleep(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, info: PassInfo) -> Tensor:
        time.sleep(PASS_SECONDS)
        ctx.info = info
        return x + 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(PASS_SECONDS)
        ctx.info.compute_weight_gradient(lambda: time.sleep(PASS_SECONDS))
        return grads[0], None


class _NoHooks:
    def on_schedule(self, passes: Sequence[SegmentPass]) -> None: ...
    def before(self, segment_pass: SegmentPass) -> None: ...
    def after(self, segment_pass: SegmentPass) -> None: ...
    def on_gradients(self, segment: int, *, is_last: bool) -> None: ...


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


def _slow_network() -> AbstractContextManager[Any]:
    def slow(x: Tensor, group: RankGroup, step: int) -> Transfer:
        return _SlowTransfer(begin_receive(x, group, step))

    return mock.patch.object(point_to_point, "begin_receive", slow)
