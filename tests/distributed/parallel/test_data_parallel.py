"""Overlap changes no bit of the result, and sharded buckets are allocated only while they are used."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from canonical_weights import hash_tensors
from everyday import nightly, one_in
from run_here import folder_flags, train_here

from megatrain.checkpoint.find import newest_valid
from megatrain.parallel.data_parallel import BucketMemory, DataParallel
from megatrain.parallel.pipeline.segments import SegmentPass
from megatrain.tools.parity.measure import NUM_STEPS, engine_of, local_batches, tiny_plan
from megatrain.tools.parity.rows import Layout
from megatrain.tools.worker_pool import WorkerPool
from megatrain.training.build import build_schedules
from megatrain.training.evaluation import evaluate

BF16 = ("--bf16", "--params-dtype", "bfloat16")


def trained(
    rank: int, world_size: int, layout: Layout, flags: tuple[str, ...]
) -> tuple[list[tuple[float, float]], list[np.ndarray]]:
    """Return loss and norm of three steps, the sums of an evaluation after them, and this rank's state."""
    engine = engine_of(tiny_plan(layout, world_size, *flags), rank)
    found = []
    for step in range(NUM_STEPS):
        batches = list(local_batches(step, layout, engine.grid.dp.rank))
        report = engine.step(
            batches, build_schedules(engine.plan).at(0), first_sample=step * layout.global_batch
        )
        found.append((report.lm_loss, report.grad_norm))
    loss, tokens = evaluate(engine, batches).tolist()
    state = [flat for kind in engine.optimizer.kinds for flat in engine.optimizer.state(kind)]
    return [*found, (loss, tokens)], [flat.double().numpy() for flat in state]


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (Layout.of("dp3 zero1 overlap tied batch12"), ()),
        nightly(Layout.of("dp4 zero1 overlap"), BF16),
        nightly(Layout.of("dp2 overlap"), BF16),
        nightly(Layout.of("tp2 sp dp2 pp2 zero1 overlap tied"), BF16),
        nightly(Layout.of("dp4 zero2 instances2 overlap"), (*BF16, "--grad-reduce-in-bf16")),
        (Layout.of("dp2 pp2 zero3 overlap tied block"), BF16),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else " ".join(value),
)
def test_overlap_changes_no_bit(pool: WorkerPool, layout: Layout, flags: tuple[str, ...]) -> None:
    with_overlap = pool.run(layout.world_size, trained, layout, flags)
    without = pool.run(layout.world_size, trained, layout.but("nooverlap"), flags)
    for (numbers, state), (expected_numbers, expected_state) in zip(with_overlap, without, strict=True):
        assert numbers == expected_numbers
        assert all(np.array_equal(a, b) for a, b in zip(state, expected_state, strict=True))


@pytest.mark.parametrize("zero", one_in(2, [3, 2]))
def test_with_one_microbatch_sharding_changes_no_bit(pool: WorkerPool, zero: int) -> None:
    layout = Layout.of("dp4 zero1 overlap tied batch8")
    expected = pool.run(4, trained, layout, BF16)
    for (numbers, state), (expected_numbers, expected_state) in zip(
        pool.run(4, trained, layout.but(f"zero{zero}"), BF16), expected, strict=True
    ):
        assert numbers == expected_numbers
        assert all(np.array_equal(a, b) for a, b in zip(state, expected_state, strict=True))


def reduced_gradients(rank: int, world_size: int, layout: Layout, flags: tuple[str, ...]) -> list[np.ndarray]:
    engine = engine_of(tiny_plan(layout, world_size, *flags), rank)
    engine.accumulate_gradients(list(local_batches(0, layout, engine.grid.dp.rank)))
    assert {flat.dtype for flat in engine.buffers.gradients.shards} == {torch.float32}
    return [flat.numpy().copy() for flat in engine.buffers.gradients.shards]


@pytest.mark.parametrize(
    "text", ["dp4 zero2 instances2 overlap", nightly("dp4 zero1 overlap"), nightly("dp2 overlap")]
)
def test_gradients_reduced_in_bf16_are_rounded_and_kept_in_fp32(pool: WorkerPool, text: str) -> None:
    layout = Layout.of(text)
    in_fp32 = pool.run(layout.dp, reduced_gradients, layout, BF16)
    in_bf16 = pool.run(layout.dp, reduced_gradients, layout, (*BF16, "--grad-reduce-in-bf16"))
    for expected, found in zip(chain(*in_fp32), chain(*in_bf16), strict=True):
        assert not np.array_equal(expected, found)
        assert np.abs(found - expected).max() <= 0.02 * np.abs(expected).max()


class Watched(DataParallel):
    """Records the largest number of sharded buckets that are allocated at once."""

    most_weights = most_gradients = 0

    def after(self, segment_pass: SegmentPass) -> None:
        self.most_weights = max(self.most_weights, num_allocated(self.buffers.weights))
        self.most_gradients = max(self.most_gradients, num_allocated(self.buffers.gradients))
        super().after(segment_pass)


def num_allocated(memory: BucketMemory) -> int:
    """Return the number of sharded buckets with memory."""
    return sum(
        full.untyped_storage().nbytes() > 0
        for number, full in enumerate(memory.full)
        if not memory.is_kept_full[number]
    )


def allocated_at_most(rank: int, world_size: int, layout: Layout) -> Sequence[int]:
    engine = engine_of(tiny_plan(layout, world_size, *BF16), rank)
    counts = [num_allocated(engine.buffers.weights), num_allocated(engine.buffers.gradients)]
    engine.data_parallel.__class__ = Watched
    for step in range(2):
        batches = list(local_batches(step, layout, engine.grid.dp.rank))
        engine.step(batches, build_schedules(engine.plan).at(0))
    evaluate(engine, batches)
    counts += [num_allocated(engine.buffers.weights), num_allocated(engine.buffers.gradients)]
    assert isinstance(engine.data_parallel, Watched)
    return [*counts, engine.data_parallel.most_weights, engine.data_parallel.most_gradients]


@pytest.mark.parametrize(
    ("layout", "most"),
    [
        nightly(Layout.of("dp2 zero2 overlap"), (0, 2)),
        (Layout.of("dp2 zero3 overlap tied uniform"), (2, 2)),
        nightly(Layout.of("dp2 zero3 overlap"), (2, 2)),
        nightly(Layout.of("dp2 zero3"), (1, 1)),
        nightly(Layout.of("dp2 pp2 zero3 overlap"), (2, 2)),
        nightly(Layout.of("dp2 zero1 overlap"), (0, 0)),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else "",
)
def test_sharded_buckets_are_allocated_for_two_segments_at_most(
    pool: WorkerPool, layout: Layout, most: tuple[int, int]
) -> None:
    for counts in pool.run(layout.world_size, allocated_at_most, layout):
        assert counts == [0, 0, 0, 0, *most]


@pytest.mark.nightly
def test_every_sharding_resumes_from_the_checkpoint_of_another_bit_for_bit(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """Each rank has one micro-batch, so that sums have the same order."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert set(pool.run(4, train_here, folder_flags(whole))) == {0}
    for strategy, stop in (("optim", 5), ("optim_grads_params", 10), ("optim_grads", 15), ("optim", 20)):
        flags = [*folder_flags(cut), "--data-parallel-sharding-strategy", strategy]
        code = 0 if stop == 20 else 75
        assert set(pool.run(4, train_here, [*flags, "--exit-interval", str(stop)])) == {code}
    expected, found = newest_valid(whole), newest_valid(cut)
    assert expected is not None
    assert found is not None
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        assert hash_tensors(found.path, kind) == hash_tensors(expected.path, kind)
