"""The loader: batches depend on the arguments alone, and errors of its threads reach the caller."""

from __future__ import annotations

import threading
from contextlib import closing

import numpy as np
import pytest
import torch

from megatrain.config.errors import InputError, MegatrainError
from megatrain.data.samples.build import SamplePlans, SplitBuilder
from megatrain.data.samples.dataset import Sample
from megatrain.data.samples.gpt_dataset import SampleOptions
from megatrain.data.samples.loader import BatchLoader
from megatrain.data.samples.sampler import CyclicSampler, DataShard, FullSampler, SingleSampler
from megatrain.parallel.documents import Documents


class Numbered:
    """A dataset whose sample k contains k. Records reads, and fails at the `bad` samples."""

    def __init__(self, count, *, bad=()):
        self.count = count
        self.bad = set(bad)
        self.read = []
        self.was_read = threading.Condition()

    def __len__(self):
        return self.count

    def __getitem__(self, k):
        with self.was_read:
            self.read.append(k)
            self.was_read.notify_all()
        if k in self.bad:
            raise InputError(f"data.bin: sample {k} is bad", fix="none")
        starts = np.arange(1 + k % 2)  # odd samples have two documents
        return Sample(np.array([k, k]), np.array([k, k + 1]), np.ones(2, np.float32), np.arange(2), starts)

    def wait_for(self, k):
        with self.was_read:
            assert self.was_read.wait_for(lambda: k in self.read, timeout=10)


def make(samples, *, micro_batch_size=2, dp_rank=0, dp_size=1, seq_length=2, **options):
    shard = DataShard(micro_batch_size=micro_batch_size, dp_rank=dp_rank, dp_size=dp_size)
    return BatchLoader(samples, SingleSampler(shard, len(samples)), seq_length=seq_length, **options)


def numbers(batches):
    return [batch.tokens[:, 0].tolist() for batch in batches]


def test_a_batch_has_its_types_and_shapes():
    with closing(make(Numbered(8))) as loader:
        (batch,) = loader.microbatches(2, 1)
    assert batch.tokens.tolist() == [[2, 2], [3, 3]]
    assert batch.labels.tolist() == [[2, 3], [3, 4]]
    assert (batch.tokens.dtype, batch.labels.dtype, batch.position_ids.dtype) == (torch.int64,) * 3
    assert batch.loss_mask.dtype == torch.float32
    assert batch.position_ids.tolist() == [[0, 1], [0, 1]]


def test_ranks_split_a_step():
    for rank in range(2):
        with closing(make(Numbered(40), dp_rank=rank, dp_size=2)) as loader:
            base = 2 * rank
            assert numbers(loader.microbatches(0, 2)) == [[base, base + 1], [base + 4, base + 5]]
            assert numbers(loader.microbatches(8, 1)) == [[base + 8, base + 9]]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_order_of_calls_and_number_of_workers_do_not_matter(num_workers):
    steps = [(0, 2), (4, 2), (8, 2), (20, 1), (4, 2), (6, 3), (12, 1), (14, 1), (0, 1)]
    with closing(make(Numbered(40), num_workers=num_workers)) as loader:
        found = [numbers(loader.microbatches(*step)) for step in steps]
    for step, batches in zip(steps, found, strict=True):
        with closing(make(Numbered(40))) as fresh:
            assert numbers(fresh.microbatches(*step)) == batches


def test_the_next_step_is_prefetched_once():
    samples = Numbered(40)
    with closing(make(samples)) as loader:
        loader.microbatches(0, 1)
        samples.wait_for(3)
        loader.microbatches(2, 1)
        samples.wait_for(5)
    assert samples.read == [0, 1, 2, 3, 4, 5]


def test_prefetching_stops_at_the_end():
    samples = Numbered(5)
    with closing(make(samples)) as loader:
        loader.microbatches(0, 1)
        loader.microbatches(2, 1)
        with pytest.raises(MegatrainError, match=r"samples 4 to 5.*has 5\n  fix: .*--train-iters"):
            loader.microbatches(4, 1)
    assert samples.read == [0, 1, 2, 3]


def test_an_error_of_a_thread_is_raised_by_its_step():
    samples = Numbered(40, bad=[3])
    with closing(make(samples)) as loader:
        loader.microbatches(0, 1)
        samples.wait_for(3)
        with pytest.raises(InputError, match="sample 3 is bad"):
            loader.microbatches(2, 1)
        assert numbers(loader.microbatches(4, 1)) == [[4, 5]]


def test_an_error_in_an_unused_prefetch_is_ignored():
    samples = Numbered(40, bad=[3])
    with closing(make(samples)) as loader:
        loader.microbatches(0, 1)
        samples.wait_for(3)
        assert numbers(loader.microbatches(10, 1)) == [[10, 11]]


def test_closing_stops_the_thread():
    before = threading.active_count()
    loader = make(Numbered(40))
    loader.microbatches(0, 1)
    assert threading.active_count() == before + 1
    loader.close()
    loader.close()
    assert threading.active_count() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_on_the_device_equal_those_on_the_host():
    sample_options = SampleOptions(seq_length=512, eod=999, vocab_size=1000)
    train = (
        SplitBuilder(sample_options)
        .build({}, "", SamplePlans(train=(64,), valid=(0,), test=(0,), seed=1))
        .train
    )
    with (
        make(train, micro_batch_size=4, seq_length=512, device="cuda") as fast,
        make(train, micro_batch_size=4, seq_length=512) as plain,
    ):
        for step in range(4):
            for moved, still in zip(
                fast.microbatches(16 * step, 4), plain.microbatches(16 * step, 4), strict=True
            ):
                assert moved.tokens.device.type == "cuda"
                for field in ("tokens", "labels", "loss_mask", "position_ids"):
                    assert torch.equal(getattr(moved, field).cpu(), getattr(still, field))


def test_cu_seqlens_of_a_batch_concatenate_its_samples():
    with closing(make(Numbered(8), has_documents=True)) as loader:
        (batch,) = loader.microbatches(0, 1)
    assert batch.documents.cu_seqlens.tolist() == [0, 2, 3, 4]
    assert batch.documents.cu_seqlens.dtype == torch.int32
    assert batch.documents.max_seqlen == 2
    mask = batch.documents.mask
    assert mask.shape == (2, 1, 2, 2)
    assert mask[:, 0].tolist() == [[[True, False], [True, True]], [[True, False], [False, True]]]


def test_a_mask_matches_its_definition():
    random = np.random.default_rng(3)
    for _ in range(20):
        b, s = map(int, random.integers(1, [4, 12]))
        inner = np.flatnonzero(random.random(b * s) < 0.3)
        boundaries = sorted({0, b * s, *(s * np.arange(b)).tolist(), *inner.tolist()})
        mask = Documents(torch.tensor(boundaries, dtype=torch.int32), 1, b, s).mask
        for sample, i, j in np.ndindex(b, s, s):
            cut = any(sample * s + j < boundary <= sample * s + i for boundary in boundaries)
            assert mask[sample, 0, i, j] == (j <= i and not cut)


def test_full_validation_pads_the_last_batch_without_loss():
    shard = DataShard(micro_batch_size=2, dp_rank=1, dp_size=2)
    sampler = FullSampler(shard, 7)
    with closing(BatchLoader(Numbered(7), sampler, seq_length=2)) as loader:
        batches = loader.microbatches(0, sampler.num_microbatches)
    assert numbers(batches) == [[2, 3], [6, 0]]
    assert batches[1].loss_mask.tolist() == [[1, 1], [0, 0]]


def test_a_cyclic_sampler_never_ends():
    sampler = CyclicSampler(DataShard(micro_batch_size=2, dp_rank=0, dp_size=1), 5)
    with closing(BatchLoader(Numbered(5), sampler, seq_length=2)) as loader:
        read = [k for step in range(6) for batch in numbers(loader.microbatches(2 * step, 1)) for k in batch]
    assert [sorted(read[4 * epoch : 4 * epoch + 4]) for epoch in range(3)] == [[0, 1, 2, 3]] * 3
