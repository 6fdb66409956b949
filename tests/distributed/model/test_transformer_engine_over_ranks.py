"""Transformer Engine's leaves over ranks, with a stand-in for the library, against `local` in one process in fp64."""

import dataclasses
from typing import Any
from unittest import mock

import pytest
from everyday import only
from transformer_engine_stand_in import stand_in

from megatrain.config import Plan
from megatrain.tools.parity import measure as measure_module
from megatrain.tools.parity.compare import judge
from megatrain.tools.parity.measure import Job, Measured, engine_of, measure, tiny_plan
from megatrain.tools.parity.rows import Layout
from megatrain.tools.worker_pool import WorkerPool

WORDS = (
    "llama",
    "llama documents zloss",
    "mup tied selective",
    "gpt2",
    "tp2 gpt2 tied",
    "tp2 sp gpt2 tied dp2 zero1 overlap",
    "tp2 sp documents uniform",
    "tp4 groups2 sp block",
    "tp3 groups1 mup",
    "tp2 sp tpoverlap gpt2 tied",
    "tp2 sp tpoverlap llama pp2",
    "tp2 sp pp2 dp2 zero3 overlap tied tokens",
    "dp2 zero2 gpt2 scale",
    "cp2 gpt2 tied",
    "cp2 allgather llama dp2 zero1 overlap",
    "tp2 sp cp2 heads mup",
    "cp4 a2aring pp2 tied tokens",
)
NO_ATTENTION_DROPOUT = ("--attention-dropout", "0")


def with_engine(rank: int, world_size: int, job: Job) -> Measured:
    """Measure as parity does, with Transformer Engine's leaves in place of `local`'s."""
    return measured(rank, world_size, job, "transformer_engine")


def with_local(rank: int, world_size: int, job: Job) -> Measured:
    return measured(rank, world_size, job, "local")


def measured(rank: int, world_size: int, job: Job, implementation: str) -> Measured:
    def changed(*known: Any, **how: Any) -> Plan:
        return plan_of(implementation, *known, **how)

    with stand_in(), mock.patch.object(measure_module, "tiny_plan", changed):
        return measure(rank, world_size, job)


def plan_of(implementation: str, layout: Layout, world_size: int, *flags: str, **how: Any) -> Plan:
    plan = tiny_plan(layout, world_size, *flags, *NO_ATTENTION_DROPOUT, **how)
    if implementation == "local":
        return plan
    # On a CPU and in fp64 `local` would supply all layers.
    values = {"transformer_impl": implementation, "attention_backend": implementation}
    return dataclasses.replace(plan, derived=plan.derived.replaced(values))


ALWAYS = {"tp2 sp gpt2 tied dp2 zero1 overlap"}
"""The layout of every test run; the others are in nightly ones."""


@pytest.mark.parametrize("words", only(ALWAYS, WORDS))
def test_a_layout_computes_what_local_computes_alone(pool: WorkerPool, words: str) -> None:
    layout = Layout.of(words)
    (reference,) = pool.run(1, with_local, Job(layout.alone))
    verdict = judge(reference, pool.run(layout.world_size, with_engine, Job(layout)))
    assert verdict.is_good, verdict


@pytest.mark.parametrize(
    "words",
    [
        "tp2 sp dp2 gpt2 fp8delayed",
        pytest.param("pp2 dp2 zero3 overlap uniform fp8delayed", marks=pytest.mark.nightly),
        pytest.param("tp2 cp2 zbh1 pp2 fp8delayed", marks=pytest.mark.nightly),
    ],
)
def test_delayed_scales_are_the_same_under_every_layout(pool: WorkerPool, words: str) -> None:
    layout = Layout.of(words)
    (reference,) = pool.run(1, with_engine, Job(layout.alone))
    verdict = judge(reference, pool.run(layout.world_size, with_engine, Job(layout)))
    assert verdict.is_good, verdict


def test_local_computes_the_products_that_overlap(pool: WorkerPool) -> None:
    without, with_overlap = (
        pool.run(2, linear_layers, Layout.of(f"tp2 sp gpt2 {word}"))[0] for word in ("tpwaits", "tpoverlap")
    )
    assert without == {"TEColumnLinear", "TERowLinear"}
    assert with_overlap == {"LocalColumnLinear", "LocalRowLinear"}


def linear_layers(rank: int, world_size: int, layout: Layout) -> set[str]:
    """Return the names of the classes of linear layers."""
    with stand_in():
        model = engine_of(plan_of("transformer_engine", layout, world_size), rank).model
    kinds = {type(module).__name__ for segment in model.segments for module in segment.modules()}
    return {kind for kind in kinds if kind.endswith("Linear")}


def test_a_missing_tensor_parallel_group_is_found(pool: WorkerPool) -> None:
    layout = Layout.of("tp2 sp")
    (reference,) = pool.run(1, with_local, Job(layout.alone))
    verdict = judge(reference, pool.run(2, without_group, Job(layout)))
    assert not verdict.is_good


def without_group(rank: int, world_size: int, job: Job) -> Measured:
    """Measure without the sum over tensor ranks."""
    import transformer_engine_stand_in as engine

    with mock.patch.object(engine, "summed", lambda x, layer: x[: len(x) // 2] if layer.is_split else x):
        return with_engine(rank, world_size, job)
