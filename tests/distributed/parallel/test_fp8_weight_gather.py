"""Weights gathered as FP8 codes: the same losses and gradients, bit for bit, as with a gather in their dtype."""

from __future__ import annotations

from unittest import mock

import pytest

from megatrain.parallel.fp8 import weight_gather
from megatrain.tools.parity.measure import Job, Measured, Precision, measure
from megatrain.tools.parity.rows import Layout
from megatrain.tools.worker_pool import WorkerPool


def measured(pool: WorkerPool, words: str, precision: Precision) -> list[Measured]:
    layout = Layout.of(words)
    return pool.run(layout.world_size, measure, Job(layout, precision))


CASES = (
    ("tp2 sp dp2 zero1 overlap {}", "bf16", "delayed"),
    ("dp2 zero3 overlap gpt2 {}", "bf16", ""),
    ("tp2 sp dp2 zero1 overlap {}", "bf16", ""),
    ("dp2 zero3 overlap gpt2 {}", "bf16", "delayed"),
    ("dp2 zero1 nooverlap {}", "fp32", ""),
    ("dp2 zero1 nooverlap {}", "fp64", "delayed"),
)


@pytest.mark.parametrize(
    ("words", "precision", "recipe"),
    [
        pytest.param(*case, marks=[] if number == 1 else pytest.mark.nightly)
        for number, case in enumerate(CASES)
    ],
)
def test_losses_and_gradients_are_the_same_bits(
    pool: WorkerPool, words: str, precision: Precision, recipe: str
) -> None:
    plain = measured(pool, words.format(f"fp8{recipe or 'tensorwise'}"), precision)
    gathered = measured(pool, words.format(f"fp8{recipe}gather"), precision)
    for one, other in zip(plain, gathered, strict=True):
        assert one.losses == other.losses
        assert one.norms == other.norms
        assert [part.name for part in one.gradients] == [part.name for part in other.gradients]
        for first, second in zip(one.gradients, other.gradients, strict=True):
            assert (first.values == second.values).all(), first.name


def calls(rank: int, world_size: int, job: Job) -> tuple[int, int, int]:
    """Return how often a run writes buckets, gathers them, and reduces largest values."""
    gather = weight_gather.Fp8WeightGather
    with (
        mock.patch.object(gather, "all_gather", autospec=True, side_effect=gather.all_gather) as writes,
        mock.patch.object(gather, "begin", autospec=True, side_effect=gather.begin) as gathers,
        mock.patch.object(weight_gather, "all_reduce", wraps=weight_gather.all_reduce) as reductions,
    ):
        measure(rank, world_size, job)
    return writes.call_count, gathers.call_count, reductions.call_count


def test_largest_values_are_reduced_once_after_a_write(pool: WorkerPool) -> None:
    """With ZeRO-3, each micro-batch gathers weights twice. A reduction is one over replicas and one over tensor ranks."""
    layout = Layout.of("dp2 zero3 overlap gpt2 fp8gather")
    for writes, gathers, reductions in pool.run(layout.world_size, calls, Job(layout)):
        assert gathers > 2 * writes
        assert 0 < reductions <= 2 * writes
