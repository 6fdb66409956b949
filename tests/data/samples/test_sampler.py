"""Samplers: recorded indices of every rank, and properties for any sizes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import EXPECTED

from megatrain.config.errors import ConfigError
from megatrain.data.samples.sampler import CyclicSampler, DataShard, FullSampler, SingleSampler

RECORDED = EXPECTED["samplers"]


def shard_of(case, rank):
    return DataShard(
        micro_batch_size=case["micro_batch_size"], dp_rank=rank, dp_size=case["data_parallel_size"]
    )


def check_steps(sampler, case, recorded):
    per_step = case["num_micro_batches"]
    for number, expected in enumerate(itertools.chain.from_iterable(recorded)):
        step, microbatch = divmod(number, per_step)
        consumed = case["consumed_samples"] + step * case["global_batch_size"]
        assert list(sampler.indices(consumed, microbatch)) == expected


@pytest.mark.parametrize("case", [case for case in RECORDED["single"] if case["drop_last"]])
def test_recorded_single_order(case):
    for rank, recorded in enumerate(case["ranks"]):
        sampler = SingleSampler(shard_of(case, rank), case["total_samples"])
        check_steps(sampler, case, [*recorded, [[]]])


@pytest.mark.parametrize("case", RECORDED["cyclic"][:-1])
def test_recorded_cyclic_order(case):
    for rank, recorded in enumerate(case["ranks"]):
        sampler = CyclicSampler(
            shard_of(case, rank), case["total_samples"], data_sharding=case["data_sharding"]
        )
        check_steps(sampler, case, recorded)


def test_uneven_ranks_without_data_sharding_are_an_error():
    case = RECORDED["cyclic"][-1]
    assert (case["total_samples"], case["data_sharding"]) == (55, False)
    with pytest.raises(
        ConfigError, match=r"--no-data-sharding: 55 samples.*\n  fix: leave out --no-data-sharding"
    ):
        CyclicSampler(shard_of(case, 0), 55, data_sharding=False)


@pytest.mark.parametrize("case", RECORDED["global_batch_at_once"])
def test_recorded_global_batches_at_once(case):
    per_step = case["global_batch_size"] // case["micro_batch_size"] // case["data_parallel_size"]
    for rank, recorded in enumerate(case["ranks"]):
        sampler = SingleSampler(shard_of(case, rank), case["total_samples"])
        for step, expected in enumerate(recorded):
            consumed = case["consumed_samples"] + step * case["global_batch_size"]
            found = [k for number in range(per_step) for k in sampler.indices(consumed, number)]
            assert found == expected


@pytest.mark.parametrize("case", RECORDED["full_validation"])
def test_recorded_full_validation(case):
    for rank, (recorded, length) in enumerate(zip(case["ranks"], case["lengths"], strict=True)):
        shard = DataShard(micro_batch_size=1, dp_rank=rank, dp_size=case["data_parallel_size"])
        sampler = FullSampler(shard, case["total_samples"])
        found = [k for number in range(sampler.num_microbatches) for k in sampler.indices(0, number)]
        assert len(found) == length
        assert found == list(itertools.chain.from_iterable(recorded))


sizes = {"total": st.integers(0, 90), "size": st.integers(1, 5), "dp_size": st.integers(1, 4)}


@given(consumed=st.integers(0, 50), **sizes)
def test_single_reads_every_sample_once(consumed, total, size, dp_size):
    shards = [DataShard(micro_batch_size=size, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
    read = [
        number
        for microbatch in range(100)
        for shard in shards
        for number in SingleSampler(shard, total).indices(consumed, microbatch)
    ]
    left = max(0, total - consumed)
    assert read == list(range(consumed, consumed + left - left % (size * dp_size)))


@given(data_sharding=st.booleans(), step=st.integers(1, 3), **sizes)
def test_cyclic_reads_an_epoch_once_wherever_steps_are_cut(total, size, dp_size, data_sharding, step):
    shards = [DataShard(micro_batch_size=size, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
    try:
        samplers = [CyclicSampler(shard, total, data_sharding=data_sharding) for shard in shards]
    except ConfigError:
        return
    for sampler in samplers:
        passes = sampler.epoch_samples // sampler.shard.global_micro_batch_size
        plain = [
            sampler.indices(number * sampler.shard.global_micro_batch_size, 0) for number in range(2 * passes)
        ]
        cut = [
            sampler.indices(n // step * step * sampler.shard.global_micro_batch_size, n % step)
            for n in range(2 * passes)
        ]
        assert plain == cut
        assert all(len(numbers) == size for numbers in plain)
    for epoch in (0, 5):
        read = [
            number
            for sampler in samplers
            for microbatch in range(sampler.epoch_samples // sampler.shard.global_micro_batch_size)
            for number in sampler.indices(epoch * sampler.epoch_samples, microbatch)
        ]
        assert len(set(read)) == len(read) == samplers[0].epoch_samples
        assert max(read) < total


@given(**sizes)
def test_full_reads_every_sample_once_in_equal_passes(total, size, dp_size):
    samplers = [
        FullSampler(DataShard(micro_batch_size=size, dp_rank=rank, dp_size=dp_size), total)
        for rank in range(dp_size)
    ]
    read = [
        k
        for sampler in samplers
        for number in range(sampler.num_microbatches)
        for k in sampler.indices(0, number)
    ]
    assert sorted(read) == list(range(total))
    assert all(len(sampler.indices(0, sampler.num_microbatches)) == 0 for sampler in samplers)


@given(**sizes)
def test_the_micro_batches_of_full_validation_do_not_depend_on_the_number_of_ranks(total, size, dp_size):
    samplers = [
        FullSampler(DataShard(micro_batch_size=size, dp_rank=rank, dp_size=dp_size), total)
        for rank in range(dp_size)
    ]
    read = [
        list(sampler.indices(0, number))
        for number in range(samplers[0].num_microbatches)
        for sampler in samplers
    ]
    expected = [list(range(first, min(first + size, total))) for first in range(0, total, size)]
    assert read == expected + [[]] * (len(read) - len(expected))
