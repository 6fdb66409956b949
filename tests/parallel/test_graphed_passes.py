"""Passes with fixed memory, as CUDA graphs need it, compute the bits of the executor. Here a graph repeats its Python calls."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from everyday import nightly

from megatrain.optim.lr_schedule import Hyperparams
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.pipeline.graph_trial import StepKind, Trial
from megatrain.parallel.pipeline.graphed_passes import GraphedPasses, Work
from megatrain.parallel.rank_lists import GridShape
from megatrain.tools.parity.measure import local_batches, tiny_plan, weights_of
from megatrain.tools.parity.rows import Layout
from megatrain.training.build import build_graphs
from megatrain.training.engine import Engine

CPU = torch.device("cpu")


class Recorder:
    """A stand-in for `Capture`: it runs nothing at first, and the same work at each replay."""

    def __init__(self) -> None:
        self.recorded: list[Recorded] = []

    def warm_up(self, work: Work) -> None:
        work()

    def record(self, works: Sequence[Work]) -> list[Recorded]:
        self.recorded += map(Recorded, works)
        return self.recorded[-len(works) :]


class Recorded:
    def __init__(self, work: Work) -> None:
        self.work: Work | None = work
        self.num_replays = 0

    def replay(self) -> None:
        assert self.work is not None
        self.num_replays += 1
        self.work()

    def reset(self) -> None:
        self.work = None


@pytest.mark.parametrize(
    "words",
    [
        nightly("llama"),
        nightly("llama tied zloss"),
        nightly("llama tokens"),
        nightly("llama uniform"),
        nightly("llama muon"),
        nightly("mixtral auxloss"),
        nightly("qwenmoe"),
        "deepseek seqauxloss mtp1",
        nightly("mixtral auxloss batch12"),
        "gpt2 attentiondropout",
        nightly("llama fp8tensorwise"),
        "llama fp8delayed",
        nightly("llama fp8blockwise"),
    ],
)
def test_replays_compute_the_bits_of_the_executor(words: str) -> None:
    layout = Layout.of(words)
    plain, graphed = (trained(layout, with_graphs=with_graphs) for with_graphs in (False, True))
    assert graphed == plain
    assert len({loss for loss, *_ in plain[0]}) == 4


def trained(layout: Layout, *, with_graphs: bool) -> tuple[list[tuple[float, ...]], list[bytes]]:
    """Train four steps; return losses and norms of each, and the weights."""
    plan = tiny_plan(layout, 1)
    engine = Engine(plan, build_grid(GridShape(), 0), CPU)
    engine.initialize()
    recorder = Recorder()
    if with_graphs:
        make_graphs = functools.partial(build_graphs, plan, engine.model, engine.grid, CPU, recorder)
        engine.training_passes = GraphedPasses(
            engine.executor, make_graphs, engine.data_parallel, 2, recorder
        )
    found = []
    for step in range(4):
        batches = list(local_batches(step, layout, 0))
        report = engine.step(batches, Hyperparams(lr=1e-2, weight_decay=0.01))
        found.append((report.lm_loss, report.grad_norm, report.z_loss or 0.0))
    if with_graphs:
        casts = engine.model.fp8 is not None
        replays = [one.num_replays for one in recorder.recorded]
        assert replays == ([2, 2 * len(batches) - 2] if casts else [2 * len(batches)])
        engine.training_passes.close()
        assert not any(one.work for one in recorder.recorded)
    return found, [part.values.tobytes() for part in weights_of(engine)]


@dataclass
class Clock:
    """Implements `Clock` of graph trials."""

    eager: float
    graphs: float
    used: float = 0.5
    kept: float = 0.2
    num_marks: int = 0

    def mark(self) -> None:
        self.num_marks += 1

    def seconds(self, number: int) -> float:
        assert number + 1 < self.num_marks
        return [9.0, self.eager, 9.0, 9.0, 9.0, self.graphs, 9.0][number]

    def used_memory(self) -> tuple[float, float]:
        return self.used, self.kept


@pytest.mark.parametrize(
    ("clock", "num_replays", "sentence"),
    [
        (Clock(0.2, 0.1), 5, "keeps CUDA graphs: 100.0 ms a step with them, 200.0 without"),
        (Clock(0.1, 0.0995), 3, "drops CUDA graphs: 99.5 ms a step with them, 100.0 without"),
        (Clock(0.2, 0.1, used=0.9), None, "records no CUDA graphs: 90% of a GPU's memory is in use"),
    ],
    ids=["faster", "as fast", "full"],
)
def test_graphs_stay_where_they_are_faster(clock: Clock, num_replays: int | None, sentence: str) -> None:
    layout, news = Layout.of("llama"), []
    engine = Engine(tiny_plan(layout, 1), build_grid(GridShape(), 0), CPU)
    engine.initialize()
    recorder = Recorder()
    make_graphs = functools.partial(build_graphs, engine.plan, engine.model, engine.grid, CPU, recorder)
    engine.training_passes = GraphedPasses(
        engine.executor,
        make_graphs,
        engine.data_parallel,
        3,
        recorder,
        Trial(clock, engine.grid.world, CPU, news.append),
    )
    losses = []
    for step in range(9):
        batches = list(local_batches(step, layout, 0))
        losses.append(engine.step(batches, Hyperparams(lr=1e-2, weight_decay=0.01)).lm_loss)
    assert news == [sentence]
    # One more in the step of the record.
    assert [one.num_replays for one in recorder.recorded] == (
        [] if num_replays is None else [(num_replays + 1) * len(batches)]
    )
    assert losses == plain_losses(9)


@pytest.mark.parametrize(
    ("used", "kept", "expected"), [(0.5, 0.2, True), (0.6, 0.3, False), (0.9, 0.85, False)]
)
def test_two_micro_batches_need_room_for_another(used: float, kept: float, expected: bool) -> None:
    trial = Trial(Clock(0.2, 0.1, used, kept), build_grid(GridShape(), 0).world, CPU, list[str]().append)
    assert trial.allows(StepKind.RECORD, 4) == (used <= 0.8)
    assert trial.has_twice_the_memory == expected


@functools.cache
def plain_losses(num_steps: int) -> list[float]:
    layout = Layout.of("llama")
    engine = Engine(tiny_plan(layout, 1), build_grid(GridShape(), 0), CPU)
    engine.initialize()
    hyperparams = Hyperparams(lr=1e-2, weight_decay=0.01)
    return [
        engine.step(list(local_batches(step, layout, 0)), hyperparams).lm_loss for step in range(num_steps)
    ]
