"""Passes with fixed memory, as CUDA graphs need it, compute the bits of the executor. Here a graph repeats its Python calls."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch

from megatrain.optim.lr_schedule import Hyperparams
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.pipeline.graph_choice import always, host_is_late
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

    def warm_up(self, work: Work) -> float:
        work()
        return 0.0

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
        "llama",
        "llama tied zloss",
        "llama tokens",
        "llama uniform",
        "llama muon",
        "mixtral auxloss",
        "qwenmoe",
        "deepseek seqauxloss mtp1",
        "mixtral auxloss batch12",
        "gpt2 attentiondropout",
        "llama fp8tensorwise",
        "llama fp8delayed",
        "llama fp8blockwise",
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
            engine.executor, make_graphs, engine.data_parallel, 2, recorder, always
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


@pytest.mark.parametrize(
    ("lead", "used", "is_chosen", "sentence"),
    [
        (0.0004, 0.5, True, "records CUDA graphs: the host is 0.4 ms ahead of the GPU and limits the speed"),
        (0.030, 0.5, False, "records no CUDA graphs: the host is 30.0 ms ahead of the GPU"),
        (0.0004, 0.9, False, "records no CUDA graphs, although the host is 0.4 ms ahead of the GPU: 90% of a GPU's memory is in use"),
    ],
)  # fmt: skip
def test_graphs_are_chosen_where_the_host_is_late(
    lead: float, used: float, is_chosen: bool, sentence: str
) -> None:
    news: list[str] = []
    world = build_grid(GridShape(), 0).world
    assert host_is_late(lead, world=world, device=CPU, used=used, tell=news.append) == is_chosen
    assert news == [sentence]


def test_passes_that_are_not_chosen_stay_with_the_executor() -> None:
    layout = Layout.of("llama")
    engine = Engine(tiny_plan(layout, 1), build_grid(GridShape(), 0), CPU)
    engine.initialize()
    leads: list[float] = []
    recorder = Recorder()
    make_graphs = functools.partial(build_graphs, engine.plan, engine.model, engine.grid, CPU, recorder)
    engine.training_passes = GraphedPasses(
        engine.executor,
        make_graphs,
        engine.data_parallel,
        2,
        recorder,
        lambda lead: leads.append(lead) or False,
    )
    for step in range(4):
        engine.step(list(local_batches(step, layout, 0)), Hyperparams(lr=1e-2, weight_decay=0.01))
    assert leads == [0.0]
    assert not recorder.recorded
