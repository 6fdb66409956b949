"""Every layout computes what one process computes, and the comparison finds the faults that it is for."""

import dataclasses
import hashlib
from typing import Any

import numpy as np
import pytest
import torch

from megatrain.parallel.grid import RankGrid
from megatrain.parallel.groups import make_group
from megatrain.tools import parity
from megatrain.tools.parity_faults import FAULTS
from megatrain.tools.worker_pool import WorkerError, WorkerPool
from megatrain.training.engine import Engine, schedules_of
from megatrain.training.launch import grid_shape


@pytest.mark.parametrize("layout", parity.LAYOUTS, ids=lambda layout: layout.name)
def test_a_layout_computes_what_one_process_computes(pool: WorkerPool, layout: parity.Layout) -> None:
    verdict = parity.compare(pool, layout)
    assert verdict.is_good, verdict


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(pool: WorkerPool, fault: str) -> None:
    layout = parity.Layout(**FAULTS[fault].layout)
    assert not parity.compare(pool, layout, fault=fault).is_good


def test_an_element_that_no_rank_holds_is_found() -> None:
    (reference,) = [parity.measure(0, 1, parity.Layout(), None)]
    lost = dataclasses.replace(reference, weights=reference.weights[1:])
    assert not parity.judge(reference, [lost]).is_good
    assert parity.judge(reference, [reference]).is_good


def test_nan_is_never_parity() -> None:
    reference = parity.measure(0, 1, parity.Layout(), None)
    poisoned = [dataclasses.replace(part, values=part.values * np.nan) for part in reference.gradients]
    assert not parity.judge(reference, [dataclasses.replace(reference, gradients=poisoned)]).is_good


LAYOUTS_OF_WEIGHTS = [
    parity.Layout(),
    parity.Layout(tp=2),
    parity.Layout(tp=4, sp=True),
    parity.Layout(dp=4),
    parity.Layout(dp=2, is_zero1=False),
    parity.Layout(pp=4),
    parity.Layout(tp=2, dp=2, pp=2),
]


NUM_TENSORS = {"llama": (9, 0), "gpt2": (16, 2), "olmo2": (11, 0), "gpt-oss": (17, 0), "qwen": (14, 0)}
"""Of a layer, and besides the layers, the embedding and the final norm's weight."""


@pytest.mark.parametrize(
    ("model", "is_tied"),
    [("llama", False), ("llama", True), ("gpt2", True), ("olmo2", False), ("gpt-oss", False), ("qwen", True)],
)
def test_initial_weights_are_the_same_bits_under_every_layout(
    pool: WorkerPool, model: str, is_tied: bool
) -> None:
    hashes = []
    for layout in LAYOUTS_OF_WEIGHTS:
        changed = dataclasses.replace(layout, is_tied=is_tied, model=model, groups=2)
        parts = [part for rank in pool.run(layout.world_size, initial_weights, changed) for part in rank]
        hashes.append(_hashes(parts))
    assert all(found == hashes[0] for found in hashes)
    in_layer, besides = NUM_TENSORS[model]
    assert len(hashes[0]) == 4 * in_layer + besides + (2 if is_tied else 3)


def test_a_tensor_without_gradient_is_not_measured_by_its_noise() -> None:
    reference = parity.measure(0, 1, parity.Layout(model="neox", is_tied=True), None)
    noisy = [
        dataclasses.replace(part, values=part.values + 1e-17 * (part.name.endswith(".k.bias")))
        for part in reference.gradients
    ]
    assert parity.judge(reference, [dataclasses.replace(reference, gradients=noisy)]).is_good
    wrong = [
        dataclasses.replace(part, values=part.values + 1e-6 * (part.name.endswith(".k.bias")))
        for part in reference.gradients
    ]
    assert not parity.judge(reference, [dataclasses.replace(reference, gradients=wrong)]).is_good


def initial_weights(rank: int, world_size: int, layout: parity.Layout) -> list[parity.Part]:
    plan = parity.tiny_plan(layout, world_size)
    grid = RankGrid.build(grid_shape(plan), rank, make_group)
    engine = Engine(plan, grid, torch.device("cpu"))
    engine.initialize()
    return parity._weights(engine)


def _hashes(parts: list[parity.Part]) -> dict[str, str]:
    """Hash of each canonical tensor; copies of an element must agree."""
    shapes: dict[str, list[int]] = {}
    for part in parts:
        shape = shapes.setdefault(part.name, [0] * len(part.box))
        shapes[part.name] = [max(size, stop) for size, (_, stop) in zip(shape, part.box, strict=True)]
    whole: dict[str, Any] = {name: np.full(shape, np.nan) for name, shape in shapes.items()}
    for part in parts:
        view = whole[part.name][tuple(slice(*edge) for edge in part.box)]
        assert (np.isnan(view) | (view == part.values)).all(), part.name
        view[...] = part.values
    return {name: hashlib.sha256(values.tobytes()).hexdigest() for name, values in whole.items()}


@pytest.mark.parametrize(
    "layout", [parity.Layout(pp=2), parity.Layout(tp=2, sp=True, pp=2)], ids=lambda x: x.name
)
def test_a_wide_residual_stream_passes_between_stages(pool: WorkerPool, layout: parity.Layout) -> None:
    layout = dataclasses.replace(layout, model="qwen", is_tied=True)
    ((alone, alone_dtype),) = pool.run(1, narrow_loss, dataclasses.replace(layout, tp=1, pp=1, sp=False))
    for loss, dtype in pool.run(layout.world_size, narrow_loss, layout):
        assert dtype == alone_dtype == "torch.float32"
        assert loss == pytest.approx(alone, rel=2e-3)


def narrow_loss(rank: int, world_size: int, layout: parity.Layout) -> tuple[float, str]:
    """Loss with bf16 weights, and the dtype of the residual stream."""
    plan = parity.tiny_plan(layout, world_size, "--bf16", "--params-dtype", "bfloat16")
    grid = RankGrid.build(grid_shape(plan), rank, make_group)
    engine = Engine(plan, grid, torch.device("cpu"))
    engine.initialize()
    batches = list(parity.own_batches(0, layout, grid.dp.rank))
    loss = engine.step(batches, schedules_of(plan).at(0)).lm_loss
    return loss, str(engine.executor.dtype)


def test_a_rank_that_fails_ends_the_job_with_its_traceback(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"rank 1 failed(.|\n)*the reason"):
        pool.run(2, _fail_on_one)
    assert pool.run(2, _rank_of) == [0, 1]


def _fail_on_one(rank: int, _world_size: int) -> None:
    if rank == 1:
        raise RuntimeError("the reason")


def _rank_of(rank: int, _world_size: int) -> int:
    return rank
