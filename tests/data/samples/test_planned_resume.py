"""A resumed run reads the same batches from any position, from real files, through the loader.

    unbroken   |---- step 0 ----|---- step 1 ----|---- step 2 ----| ..     all samples of the blend
    resumed                 ^ consumed: |-- a step --|-- a step --| ..     must equal the rest

Each dataset of the blend is read more than twice.
"""

from __future__ import annotations

import functools
import itertools
from contextlib import closing

import pytest
from damaged_pairs import VOCAB, write_pair

from megatrain.config.derive.datasets import Blend
from megatrain.data.samples.build import SamplePlans, SplitBuilder
from megatrain.data.samples.gpt_dataset import SampleOptions
from megatrain.data.samples.loader import BatchLoader
from megatrain.data.samples.sampler import CyclicSampler, DataShard, SingleSampler

SEQ_LENGTH = 8
NUM_SAMPLES = 80
GLOBAL_BATCH = 8
LAYOUTS = [(1, 1), (2, 1), (8, 1), (1, 2), (2, 2), (4, 2), (1, 4), (2, 4), (1, 8)]
"""(micro-batch size, data-parallel size)"""


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Return a function that builds a blend of two datasets for given plans."""
    folder = tmp_path_factory.mktemp("data")
    prefixes = tuple(str(write_pair(folder / name, seed=seed)) for seed, name in enumerate("ab"))

    @functools.cache
    def build_plans(*plans):
        sample_options = SampleOptions(seq_length=SEQ_LENGTH, eod=0, vocab_size=VOCAB)
        blend = Blend(prefixes, (0.375, 0.625))
        builder = SplitBuilder(sample_options)
        return builder.build(
            {"all": blend}, "1,0,0", SamplePlans(train=plans, valid=(0,), test=(0,), seed=1)
        ).train

    return build_plans


def contents(batch):
    """Return the samples of a batch, each as one tuple."""
    rows = zip(batch.tokens.tolist(), batch.labels.tolist(), batch.loss_mask.tolist(), strict=True)
    return [(*tokens, *labels, *mask) for tokens, labels, mask in rows]


def of_sample(sample):
    return (*sample.tokens.tolist(), *sample.labels.tolist(), *sample.loss_mask.tolist())


def read(samples, sampler, consumed, end, *, num_microbatches, num_workers=0):
    """Return the micro-batches of one rank from a loader that starts at `consumed` samples, up to `end`."""
    size = sampler.shard.global_micro_batch_size
    found = []
    with closing(BatchLoader(samples, sampler, seq_length=SEQ_LENGTH, num_workers=num_workers)) as loader:
        while consumed < end:
            count = min(num_microbatches, (end - consumed) // size)
            found += [contents(batch) for batch in loader.microbatches(consumed, count)]
            consumed += count * size
    return found


def shards(micro_batch_size, dp_size):
    return [
        DataShard(micro_batch_size=micro_batch_size, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)
    ]


def global_batches(samples, order_of, layout, end, *, num_workers=0):
    """Return the samples of each step, micro-batch by micro-batch and rank by rank."""
    micro_batch_size, dp_size = layout
    per_step = GLOBAL_BATCH // (micro_batch_size * dp_size)
    ranks = [
        read(samples, order_of(shard), 0, end, num_microbatches=per_step, num_workers=num_workers)
        for shard in shards(micro_batch_size, dp_size)
    ]
    flat = [row for microbatch in zip(*ranks, strict=True) for rows in microbatch for row in rows]
    return [flat[start : start + GLOBAL_BATCH] for start in range(0, end, GLOBAL_BATCH)]


def single(samples):
    return lambda shard: SingleSampler(shard, len(samples))


def cyclic(samples, *, data_sharding):
    return lambda shard: CyclicSampler(shard, len(samples), data_sharding=data_sharding)


def check_every_cut(samples, sampler, end, *, num_workers):
    """A loader that starts anywhere reads the same as the rest of one that started at 0."""
    size = sampler.shard.global_micro_batch_size
    unbroken = read(samples, sampler, 0, end, num_microbatches=GLOBAL_BATCH // size)
    assert len(unbroken) == end // size
    for consumed in range(0, end + 1, size):
        rest = read(samples, sampler, consumed, end, num_microbatches=2, num_workers=num_workers)
        assert rest == unbroken[consumed // size :], f"cut at {consumed}"


def test_each_dataset_is_read_more_than_twice_and_samples_differ(build):
    samples = build(NUM_SAMPLES)
    assert len(samples) == NUM_SAMPLES
    for number, dataset in enumerate(samples.datasets):
        per_epoch = dataset.source.num_tokens / SEQ_LENGTH
        assert samples.index.counts(2)[number] > 2 * per_epoch
    every = [of_sample(samples[k]) for k in range(NUM_SAMPLES)]
    assert len(set(every)) > 0.9 * NUM_SAMPLES, "samples are distinct"


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_a_single_pass_resumes_anywhere(build, num_workers):
    samples = build(NUM_SAMPLES)
    for shard in shards(2, 2):
        check_every_cut(samples, SingleSampler(shard, NUM_SAMPLES), NUM_SAMPLES, num_workers=num_workers)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("data_sharding", [True, False], ids=["sharded", "shared"])
def test_a_cyclic_sampler_resumes_anywhere_in_its_epochs(build, num_workers, data_sharding):
    samples = build(30)
    for shard in shards(2, 2):
        sampler = CyclicSampler(shard, len(samples) // 4 * 4, data_sharding=data_sharding)
        assert sampler.epoch_samples % GLOBAL_BATCH, "a global batch spans two epochs"
        check_every_cut(samples, sampler, 2 * sampler.epoch_samples + 12, num_workers=num_workers)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_layout_reads_the_same_samples_in_the_same_order(build, layout):
    samples = build(NUM_SAMPLES)
    found = global_batches(samples, single(samples), layout, NUM_SAMPLES)
    flat = [of_sample(samples[k]) for k in range(NUM_SAMPLES)]
    assert found == [flat[start : start + GLOBAL_BATCH] for start in range(0, NUM_SAMPLES, GLOBAL_BATCH)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_layout_reads_the_same_set_of_a_shared_permutation(build, layout):
    samples = build(NUM_SAMPLES)
    steps = 2 * NUM_SAMPLES + 2 * GLOBAL_BATCH
    expected = global_batches(samples, cyclic(samples, data_sharding=False), (1, 1), steps)
    found = global_batches(samples, cyclic(samples, data_sharding=False), layout, steps)
    assert [sorted(batch) for batch in found] == [sorted(batch) for batch in expected]


@pytest.mark.parametrize("layout", [(2, 2), (1, 4), (8, 1)], ids=str)
def test_a_sharded_epoch_reads_every_sample(build, layout):
    samples = build(NUM_SAMPLES)
    every = sorted(of_sample(samples[k]) for k in range(NUM_SAMPLES))
    found = global_batches(samples, cyclic(samples, data_sharding=True), layout, 4 * NUM_SAMPLES)
    per_epoch = NUM_SAMPLES // GLOBAL_BATCH
    epochs = [found[start : start + per_epoch] for start in range(0, len(found), per_epoch)]
    for epoch in epochs:
        assert sorted(row for batch in epoch for row in batch) == every
    assert all(one != other for one, other in itertools.pairwise(epochs)), "each in another order"


FIRST, FURTHER = 20, 28
"""Samples of the plan in the checkpoint and of the appended plan; 20 lies within a global batch."""


def test_a_further_plan_begins_within_a_global_batch(build):
    assert FIRST % GLOBAL_BATCH
    first, second = build(FIRST), build(FIRST, FURTHER)
    end = FIRST + FURTHER
    assert len(second) >= end
    assert [of_sample(second[k]) for k in range(FIRST)] == [of_sample(first[k]) for k in range(FIRST)]
    further = second.plans[1]
    assert [of_sample(second[FIRST + k]) for k in range(FURTHER)] == [
        of_sample(further[k]) for k in range(FURTHER)
    ]
    batch = global_batches(second, single(second), (2, 2), end)[FIRST // GLOBAL_BATCH]
    numbers = range(FIRST - FIRST % GLOBAL_BATCH, FIRST)
    kept = [of_sample(first[k]) for k in numbers]
    assert batch == kept + [of_sample(further[k]) for k in range(GLOBAL_BATCH - len(kept))]


def test_a_longer_run_continues_after_the_shorter_one(build):
    """Samples consumed under the first plan are not read again in another order."""
    first, second = build(FIRST), build(FIRST, FURTHER)
    consumed = FIRST - FIRST % GLOBAL_BATCH  # where a run of 20 samples in global batches of 8 ends
    for shard in shards(2, 2):
        size = shard.global_micro_batch_size
        before = read(first, SingleSampler(shard, len(first)), 0, consumed, num_microbatches=2)
        after = read(
            second,
            SingleSampler(shard, len(second)),
            consumed,
            FIRST + FURTHER,
            num_microbatches=2,
            num_workers=1,
        )
        expected = [
            [of_sample(second[k]) for k in SingleSampler(shard, len(second)).indices(start, 0)]
            for start in range(0, FIRST + FURTHER, size)
        ]
        assert before + after == expected


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_plans_resume_anywhere(build, num_workers):
    samples = build(FIRST, FURTHER, 16)
    end = FIRST + FURTHER + 16
    for shard in shards(2, 2):
        check_every_cut(samples, SingleSampler(shard, len(samples)), end, num_workers=num_workers)


@pytest.mark.parametrize("layout", [(1, 1), (4, 2), (2, 4)], ids=str)
def test_any_layout_reads_plans_in_the_same_order(build, layout):
    samples = build(FIRST, FURTHER, 16)
    end = FIRST + FURTHER + 16
    flat = [of_sample(samples[k]) for k in range(end)]
    found = global_batches(samples, single(samples), layout, end, num_workers=1)
    assert found == [flat[start : start + GLOBAL_BATCH] for start in range(0, end, GLOBAL_BATCH)]
