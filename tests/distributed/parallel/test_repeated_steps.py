"""A step whose experts lack memory is computed again, and no bit differs from a run with memory for every assignment."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from everyday import nightly
from torch import Tensor

from megatrain.model.experts.router import Router
from megatrain.optim.lr_schedule import Hyperparams
from megatrain.parallel.pipeline.graphed_passes import GraphedPasses
from megatrain.parallel.rank_capacity import RankCapacity
from megatrain.parallel.tensor_overlap.peer_memory import NUM_SLOTS, PeerMemory
from megatrain.tools.parity.measure import engine_of, local_batches, tiny_plan, weights_of
from megatrain.tools.parity.rows import Layout
from megatrain.tools.worker_pool import WorkerPool
from megatrain.training.build import build_graphs

NUM_STEPS = 4


@pytest.mark.parametrize(
    ("words", "with_graphs"),
    [
        ("dp2 deepseek ep2 seqauxloss batch16", True),
        nightly("dp2 mixtral ep2 moeoverlap batch16", True),
        nightly("dp2 zero2 overlap mixtral ep2 globalauxloss batch16", False),
        nightly("dp2 pp2 interleaved zero1 overlap mixtral ep2 uniform batch16", False),
    ],
)
def test_a_repeated_step_changes_no_bit(pool: WorkerPool, words: str, with_graphs: bool) -> None:
    layout = Layout.of(words)
    found = pool.run(layout.world_size, trained, layout.but("scarce"), with_graphs)
    expected = pool.run(layout.world_size, trained, layout, with_graphs)
    for (repeats, *results), (none, *others) in zip(found, expected, strict=True):
        assert none == [0] * NUM_STEPS
        assert repeats[0] > 0
        assert sum(repeats) < 2 * NUM_STEPS
        assert results == others


@pytest.mark.parametrize(
    ("words", "factor", "with_graphs"),
    [
        ("dp2 mixtral ep2 batch8", "1.75", True),
        nightly("dp4 mixtral ep4 batch16", "2.5", True),
        nightly("dp2 pp2 zbh1 mixtral ep2 batch16", "1.75", False),
    ],
)
def test_loads_that_move_to_one_rank_change_no_bit(
    pool: WorkerPool, words: str, factor: str, with_graphs: bool
) -> None:
    """All tokens go to the experts of the first rank from the second step on, which has memory for fewer."""
    layout = Layout.of(words)
    found, expected = (
        pool.run(layout.world_size, trained, layout, with_graphs, each, 9.0) for each in (factor, "none")
    )
    for (repeats, *results), (none, *others) in zip(found, expected, strict=True):
        assert none == [0] * NUM_STEPS
        assert repeats[0] == 0 < repeats[1]
        assert sum(repeats[2:]) == 0
        assert results == others


def test_graphs_in_turn_change_no_bit(pool: WorkerPool) -> None:
    """Steps without graphs have no turns; each action of a graph has a pass of two micro-batches."""
    layout = Layout.of("dp2 mixtral ep2 batch12")
    replayed, executed = (pool.run(2, trained, layout, how) for how in ("in turn", False))
    assert replayed == executed


def trained(
    rank: int,
    world_size: int,
    layout: Layout,
    with_graphs: bool | Literal["in turn"],
    factor: str = "",
    skew: float = 0,
) -> tuple[Any, ...]:
    """Train some steps; return repeats and losses of each, and the bits of the weights.

    Args:
        factor: of the capacities at first; empty: of the layout.
        skew: added after the first step to the logits of the experts of the first rank.
    """
    flags = ["--moe-expert-rank-capacity-factor", factor] if factor else []
    plan, in_turn = tiny_plan(layout, world_size, *flags), with_graphs == "in turn"
    plan = dataclasses.replace(plan, derived=plan.derived.replaced({"graphs_in_turn": in_turn}))
    engine = engine_of(plan, rank)
    if with_graphs:
        recorder = Repeats()
        make_graphs = functools.partial(
            build_graphs, plan, engine.model, engine.grid, engine.device, recorder, in_turn=in_turn
        )
        engine.training_passes = GraphedPasses(
            engine.executor, make_graphs, engine.data_parallel, 1, recorder
        )
    repeats, losses = [], []
    for step in range(NUM_STEPS):
        before = len(engine.news)
        if step == 2 and layout.has("scarce"):  # a graph is recorded by now
            for layer in engine.model.communication.capacities.layers:
                layer.factor = 0.5
        with skewed(skew if step else 0, engine.grid.ep.size):
            report = engine.step(
                list(local_batches(step, layout, engine.grid.dp.rank)),
                Hyperparams(lr=1e-2, weight_decay=0.01),
            )
        repeats.append(len(engine.news) - before)
        losses.append((report.lm_loss, report.grad_norm))
    return repeats, losses, [part.values.tobytes() for part in weights_of(engine)]


def skewed(skew: float, ep: int) -> AbstractContextManager[Any]:
    """Add a number to the logits of the experts of the first of `ep` ranks."""
    compute = Router._logits

    def more(self: Router, *known: Any) -> Tensor:
        logits = compute(self, *known)
        of_first = torch.arange(logits.shape[1]) < logits.shape[1] // ep
        return logits + skew * of_first

    return mock.patch.object(Router, "_logits", more)


class Repeats:
    """A stand-in for CUDA graphs. Each replay has whole rounds of sends, so that a graph can repeat their slots."""

    def warm_up(self, work: Callable[[], None]) -> None:
        work()

    def record(self, works: Sequence[Callable[[], None]]) -> list[Any]:
        return [SimpleNamespace(replay=functools.partial(replay, work), reset=lambda: None) for work in works]


def replay(work: Callable[[], None]) -> None:
    with mock.patch.object(PeerMemory, "send", autospec=True, side_effect=PeerMemory.send) as send:
        work()
    assert send.call_count % NUM_SLOTS == 0


@pytest.mark.parametrize(
    "words",
    [
        "tp2 sp tpoverlap llama",
        "dp2 deepseek ep2 moeoverlap seqauxloss batch12",
        nightly("pp2 llama tied"),
        nightly("pp2 interleaved llama mtp1 noposts"),
        nightly("pp2 zbh1 dp2 zero1 overlap llama"),
        nightly("pp2 zbv mixtral auxloss"),
        "pp2 dualpipev llama fp8delayed",
        nightly("pp2 tp2 sp tpoverlap llama"),
    ],
)
@pytest.mark.nightly
def test_replays_between_messages_change_no_bit(pool: WorkerPool, words: str) -> None:
    layout = Layout.of(words)
    replayed, executed = (
        pool.run(layout.world_size, trained, layout, with_graphs) for with_graphs in (True, False)
    )
    assert replayed == executed


def test_ranks_agree_on_the_repeat_if_one_lacks_memory(pool: WorkerPool) -> None:
    layout = Layout.of("dp2 mixtral ep2 scarce batch16")
    repeats = pool.run(2, repeats_if_one_is_full, layout)
    assert repeats[0] == repeats[1] > 0


def repeats_if_one_is_full(rank: int, world_size: int, layout: Layout) -> int:
    engine = engine_of(tiny_plan(layout, world_size), rank)
    num_rows = RankCapacity.num_rows if rank else lambda *_: _[-1]
    with mock.patch.object(RankCapacity, "num_rows", num_rows):
        engine.step(
            list(local_batches(0, layout, engine.grid.dp.rank)), Hyperparams(lr=1e-2, weight_decay=0.01)
        )
    return len(engine.news)
