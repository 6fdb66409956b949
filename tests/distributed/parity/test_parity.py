"""Every layout gives the results of one process."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from everyday import nightly, only

from megatrain.tools.main import parser
from megatrain.tools.parity.choice import chosen_rows
from megatrain.tools.parity.cli import Comparer
from megatrain.tools.parity.compare import judge
from megatrain.tools.parity.low_precision import (
    NUM_DRAWS,
    LowPrecisionComparer,
    is_supported_in,
    of_any_micro_batch,
)
from megatrain.tools.parity.measure import (
    Job,
    Measured,
    Part,
    Precision,
    engine_of,
    local_batches,
    measure,
    tiny_plan,
    weights_of,
)
from megatrain.tools.parity.models import MODELS
from megatrain.tools.parity.rows import Layout
from megatrain.tools.parity.tables import ALWAYS, PACKED_ROWS, QUICK_ROWS, is_row, pairwise_rows
from megatrain.tools.worker_pool import WorkerError, WorkerPool
from megatrain.training.build import build_schedules

ROWS = (ALWAYS[1], ALWAYS[2], ALWAYS[7])
"""Rows of every test run: each axis with others, experts, latent attention, multi-token prediction and BERT."""


@pytest.mark.parametrize(
    "text", [*only(ROWS, ALWAYS), *map(nightly, (f"tokens {row}" for row in PACKED_ROWS))]
)
def test_a_layout_computes_what_one_process_computes(comparer: Comparer, text: str) -> None:
    verdict = comparer.compare(Layout.of(text))
    assert verdict.is_good, verdict


@pytest.mark.nightly
def test_the_quick_rows_compute_what_one_process_computes(comparer: Comparer) -> None:
    verdicts = {layout.name: comparer.compare(layout) for layout in pairwise_rows(most=QUICK_ROWS)}
    assert {name: verdict for name, verdict in verdicts.items() if not verdict.is_good} == {}


@pytest.mark.nightly
def test_a_layout_outside_the_table_passes(comparer: Comparer) -> None:
    words = "tp2 sp dp2 zero3 muon neox".split()
    (row,) = chosen_rows(parser("parity").parse_args(["parity", "--precision", "fp64", "--layouts", *words]))
    verdict = comparer.compare(row[1])
    assert verdict.is_good, verdict


LOW_PRECISION_LAYOUTS = (
    "tp2 sp tied gpt2",
    "cp2 heads pp2 documents hollow",
    "dp2 zero1 overlap mixtral ep2 alltoall",
    "dp2 zero1 overlap scale",
    "pp2 tied gemma2",
    "tp2 sp dp2 zero1 overlap uniform documents",
    "dp2 zero1 deepseek ep2",
    "tp2 sp cp2 qwenmoe ep2 etp2 alltoall",
    "tp2 sp dp2 zero1 bert attentiondropout",
    "cp2 dp2 zero3 overlap tied mlm",
    "dp2 pp2 zero2 t5",
)


@pytest.mark.nightly  # the row of bf16 below runs every day
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("text", LOW_PRECISION_LAYOUTS)
def test_a_layout_differs_by_rounding_only(
    low_precision: dict[Precision, LowPrecisionComparer], precision: Precision, text: str
) -> None:
    verdict = low_precision[precision].compare(Layout.of(text))
    assert verdict.is_good, verdict


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_rows_in_low_precision(model: str) -> None:
    """Its loss is the same with micro-batches of any size, whose noise is measured."""
    layout = of_any_micro_batch(Layout.of(model))
    assert is_row(layout.words)
    assert is_supported_in("bf16", layout)
    whole, halves = (sum_of_means(layout, micro_batch=size) for size in (2, 1))
    assert halves == pytest.approx(whole, rel=1e-12)


def sum_of_means(layout: Layout, *, micro_batch: int) -> float:
    """Return the mean of labels, as the loss of a global batch weights them."""
    batches = list(local_batches(0, layout, 0, micro_batch=micro_batch, has_even_labels=layout.has("means")))
    sums = [float((one.labels.double() * one.loss_mask.double()).sum()) for one in batches]
    counts = [float(one.loss_mask.sum()) for one in batches]
    if layout.has("tokens"):
        return sum(sums) / sum(counts)
    return sum(total / count for total, count in zip(sums, counts, strict=True)) / len(batches)


@pytest.mark.parametrize(
    ("precision", "text"),
    [
        ("bf16", "dp2 zero2 overlap scale sumsbf16"),
        nightly("bf16", "dp4 zero3 instances2 sumsbf16 momentsbf16"),
        nightly("bf16", "dp2 mixtral ep2 sumsbf16 routersfp64"),
        nightly("fp32", "tp2 dp2 zero1 muon muonfp32"),
        nightly("fp16", "dp2 zero1 overlap"),
        nightly("fp16", "tp2 sp dp2 zero1 overlap"),
    ],
)
def test_number_formats_differ_by_rounding_only(
    low_precision: dict[Precision, LowPrecisionComparer], precision: Precision, text: str
) -> None:
    layout = of_any_micro_batch(Layout.of(text))
    assert is_supported_in(precision, layout)
    verdict = low_precision[precision].compare(layout)
    assert verdict.is_good, verdict


class FakePool(WorkerPool):
    """A pool without processes that returns given norms: 1 in fp64, `alone` by draw for one process, `found` for a layout."""

    def __init__(self, alone: Sequence[float], found: float) -> None:
        super().__init__(1)
        self.alone, self.found = alone, found
        self.draws: set[int] = set()

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        (job,) = arguments
        self.draws.add(job.draw)
        norm = self.found if world_size > 1 else 1.0 if job.precision == "fp64" else self.alone[job.draw]
        part = Part("weight", ((0, 1),), np.ones(1))
        return [Measured([1.0] * 3, [norm] * 3, [part], [part], [part])] * world_size


@pytest.mark.parametrize(
    ("found", "num_draws", "is_good"),
    [(1.0003, 1, True), (1.003, 3, True), (1.01, NUM_DRAWS, False)],
    ids=["within the noise", "where other weights show more noise", "beyond any"],
)
def test_noise_that_cancels_by_chance_is_measured_again(found: float, num_draws: int, is_good: bool) -> None:
    """The noise of a norm is a single number. If a row exceeds it, the noise is measured with other initial weights."""
    pool = FakePool([1.0001, 1.0001, 1.001, *[1.0001] * (NUM_DRAWS - 3)], found)
    assert LowPrecisionComparer(pool, "fp32").compare(Layout.of("tp2")).is_good == is_good
    assert pool.draws == set(range(num_draws))


def test_a_missing_element_is_found() -> None:
    reference = measure(0, 1, Job(Layout.of("")))
    lost = dataclasses.replace(reference, weights=reference.weights[1:])
    assert not judge(reference, [lost]).is_good
    assert judge(reference, [reference]).is_good


def test_nan_fails() -> None:
    reference = measure(0, 1, Job(Layout.of("")))
    poisoned = [dataclasses.replace(part, values=part.values * np.nan) for part in reference.gradients]
    assert not judge(reference, [dataclasses.replace(reference, gradients=poisoned)]).is_good


LAYOUTS_OF_WEIGHTS = ("", "tp2", "tp4 sp", "dp4 zero1", "dp2", "pp4", "tp2 dp2 zero1 pp2")


NUM_TENSORS = {"llama": (9, 0), "gpt2": (16, 2), "olmo2": (11, 0), "gpt-oss": (17, 0), "qwen": (16, 0)}
"""Tensors of a layer; tensors outside the layers, without the embedding and the final norm's weight."""


@pytest.mark.parametrize(
    ("model", "is_tied"),
    [
        ("llama", False),
        nightly("gpt2", True),
        nightly("llama", True),
        nightly("olmo2", False),
        nightly("gpt-oss", False),
        nightly("qwen", True),
    ],
)
def test_initial_weights_are_the_same_bits_under_every_layout(
    pool: WorkerPool, model: str, is_tied: bool
) -> None:
    hashes = []
    for text in LAYOUTS_OF_WEIGHTS:
        layout = Layout.of(f"{text} {model} groups2 {'tied' if is_tied else 'untied'}")
        parts = [part for rank in pool.run(layout.world_size, initial_weights, layout) for part in rank]
        hashes.append(_hashes(parts))
    assert all(found == hashes[0] for found in hashes)
    in_layer, outside = NUM_TENSORS[model]
    assert len(hashes[0]) == 4 * in_layer + outside + (2 if is_tied else 3)


def test_a_zero_gradient_is_not_compared_relative_to_its_rounding() -> None:
    reference = measure(0, 1, Job(Layout.of("tied neox")))
    noisy = [
        dataclasses.replace(part, values=part.values + 1e-17 * (part.name.endswith(".k.bias")))
        for part in reference.gradients
    ]
    assert judge(reference, [dataclasses.replace(reference, gradients=noisy)]).is_good
    wrong = [
        dataclasses.replace(part, values=part.values + 1e-6 * (part.name.endswith(".k.bias")))
        for part in reference.gradients
    ]
    assert not judge(reference, [dataclasses.replace(reference, gradients=wrong)]).is_good


def initial_weights(rank: int, world_size: int, layout: Layout) -> list[Part]:
    return weights_of(engine_of(tiny_plan(layout, world_size), rank))


def _hashes(parts: list[Part]) -> dict[str, str]:
    """Return the hash of each canonical tensor; copies of an element must agree."""
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


@pytest.mark.parametrize("text", ["pp2 tied qwen", nightly("tp2 sp pp2 tied qwen")])
def test_stages_exchange_an_fp32_residual_stream(pool: WorkerPool, text: str) -> None:
    layout = Layout.of(text)
    ((alone, alone_dtype),) = pool.run(1, low_precision_loss, layout.alone)
    for loss, dtype in pool.run(layout.world_size, low_precision_loss, layout):
        assert dtype == alone_dtype == "torch.float32"
        assert loss == pytest.approx(alone, rel=2e-3)


def low_precision_loss(rank: int, world_size: int, layout: Layout) -> tuple[float, str]:
    """Return the loss with bf16 weights and the dtype of the residual stream."""
    plan = tiny_plan(layout, world_size, "--bf16", "--params-dtype", "bfloat16")
    engine = engine_of(plan, rank)
    batches = list(local_batches(0, layout, engine.grid.dp.rank))
    loss = engine.step(batches, build_schedules(plan).at(0)).lm_loss
    return loss, str(engine.executor.dtype)


def test_a_rank_that_fails_ends_the_job_with_its_traceback(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"rank 1 failed(.|\n)*the reason"):
        pool.run(2, _fail_on_rank_1)
    assert pool.run(2, _rank_of) == [0, 1]


def _fail_on_rank_1(rank: int, _world_size: int) -> None:
    if rank == 1:
        raise RuntimeError("the reason")


def _rank_of(rank: int, _world_size: int) -> int:
    return rank
