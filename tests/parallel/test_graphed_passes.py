"""Passes with fixed memory, as CUDA graphs need it, compute the bits of the executor. Here a graph repeats its Python calls."""

from __future__ import annotations

import pytest
import torch

from megatrain.optim.lr_schedule import Hyperparams
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.pipeline.graphed_passes import GraphedPasses, NoHooks, Work
from megatrain.parallel.rank_lists import GridShape
from megatrain.tools.parity.measure import local_batches, tiny_plan, weights_of
from megatrain.tools.parity.rows import Layout
from megatrain.training.build import build_executor
from megatrain.training.engine import Engine

CPU = torch.device("cpu")


class Recorder:
    """A stand-in for `Capture` and its result: it runs nothing at first, and the same work at each replay."""

    def __init__(self) -> None:
        self.num_captures = self.num_replays = 0
        self.work: Work | None = None

    def warm_up(self, work: Work) -> None:
        work()

    def record(self, work: Work) -> Recorder:
        self.num_captures += 1
        self.work = work
        return self

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
        bare = build_executor(plan, engine.model, NoHooks(), engine.grid, CPU)
        engine.training_passes = GraphedPasses(engine.executor, bare, engine.data_parallel, 2, recorder)
    found = []
    for step in range(4):
        batches = list(local_batches(step, layout, 0))
        report = engine.step(batches, Hyperparams(lr=1e-2, weight_decay=0.01))
        found.append((report.lm_loss, report.grad_norm, report.z_loss or 0.0))
    if with_graphs:
        assert recorder.num_captures == 1
        assert recorder.num_replays == 2 * len(batches)
        engine.training_passes.close()
        assert recorder.work is None
    return found, [part.values.tobytes() for part in weights_of(engine)]
