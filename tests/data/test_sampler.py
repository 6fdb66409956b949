"""The orders of samples: recorded numbers of every rank, and what must hold for any sizes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import EXPECTED

from megatrain.config.errors import ConfigError
from megatrain.data.samples.sampler import CyclicOrder, Share, SingleOrder, WholeOrder

RECORDED = EXPECTED["samplers"]


def share_of(case, rank):
    return Share(micro_batch_size=case["micro_batch_size"], dp_rank=rank, dp_size=case["data_parallel_size"])


def check_steps(order, case, recorded):
    per_step = case["num_micro_batches"]
    for number, expected in enumerate(itertools.chain.from_iterable(recorded)):
        step, microbatch = divmod(number, per_step)
        consumed = case["consumed_samples"] + step * case["global_batch_size"]
        assert list(order.numbers(consumed, microbatch)) == expected


@pytest.mark.parametrize("case", RECORDED["single"])
def test_recorded_single_order(case):
    for rank, recorded in enumerate(case["ranks"]):
        order = SingleOrder(share_of(case, rank), case["total_samples"], case["drop_last"])
        check_steps(order, case, [*recorded, [[]]])


@pytest.mark.parametrize("case", RECORDED["cyclic"][:-1])
def test_recorded_cyclic_order(case):
    for rank, recorded in enumerate(case["ranks"]):
        order = CyclicOrder(share_of(case, rank), case["total_samples"], data_sharding=case["data_sharding"])
        check_steps(order, case, recorded)


def test_where_megatrons_ranks_drift_apart_there_is_an_error():
    case = RECORDED["cyclic"][-1]
    assert (case["total_samples"], case["data_sharding"]) == (55, False)
    with pytest.raises(
        ConfigError, match=r"55 samples in micro-batches of 2 .* 4 data-parallel.*\n  fix: leave out"
    ):
        CyclicOrder(share_of(case, 0), 55, data_sharding=False)


@pytest.mark.parametrize("case", RECORDED["global_batch_at_once"])
def test_recorded_global_batches_at_once(case):
    per_step = case["global_batch_size"] // case["micro_batch_size"] // case["data_parallel_size"]
    for rank, recorded in enumerate(case["ranks"]):
        order = SingleOrder(share_of(case, rank), case["total_samples"])
        for step, expected in enumerate(recorded):
            consumed = case["consumed_samples"] + step * case["global_batch_size"]
            found = [k for number in range(per_step) for k in order.numbers(consumed, number)]
            assert found == expected


@pytest.mark.parametrize("case", RECORDED["full_validation"])
def test_recorded_full_validation(case):
    for rank, (recorded, length) in enumerate(zip(case["ranks"], case["lengths"], strict=True)):
        share = Share(micro_batch_size=1, dp_rank=rank, dp_size=case["data_parallel_size"])
        order = WholeOrder(share, case["total_samples"])
        found = [k for number in range(order.num_microbatches) for k in order.numbers(0, number)]
        assert len(found) == length
        assert found == list(itertools.chain.from_iterable(recorded))


sizes = {"total": st.integers(0, 90), "size": st.integers(1, 5), "dp_size": st.integers(1, 4)}


@given(consumed=st.integers(0, 50), drop_last=st.booleans(), **sizes)
def test_single_reads_every_sample_once(consumed, total, size, dp_size, drop_last):
    shares = [Share(micro_batch_size=size, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
    read = [
        number
        for microbatch in range(100)
        for share in shares
        for number in SingleOrder(share, total, drop_last).numbers(consumed, microbatch)
    ]
    left = max(0, total - consumed)
    assert read == list(range(consumed, consumed + (left - left % (size * dp_size) if drop_last else left)))


@given(data_sharding=st.booleans(), step=st.integers(1, 3), **sizes)
def test_cyclic_reads_an_epoch_once_wherever_steps_are_cut(total, size, dp_size, data_sharding, step):
    shares = [Share(micro_batch_size=size, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
    try:
        orders = [CyclicOrder(share, total, data_sharding=data_sharding) for share in shares]
    except ConfigError:
        return
    for order in orders:
        passes = order.epoch_samples // order.share.pass_size
        plain = [order.numbers(number * order.share.pass_size, 0) for number in range(2 * passes)]
        cut = [order.numbers(n // step * step * order.share.pass_size, n % step) for n in range(2 * passes)]
        assert plain == cut
        assert all(len(numbers) == size for numbers in plain)
    for epoch in (0, 5):
        read = [
            number
            for order in orders
            for microbatch in range(order.epoch_samples // order.share.pass_size)
            for number in order.numbers(epoch * order.epoch_samples, microbatch)
        ]
        assert len(set(read)) == len(read) == orders[0].epoch_samples
        assert max(read) < total


@given(**sizes)
def test_whole_reads_everything_once_in_equal_passes(total, size, dp_size):
    orders = [
        WholeOrder(Share(micro_batch_size=size, dp_rank=rank, dp_size=dp_size), total)
        for rank in range(dp_size)
    ]
    read = [
        k for order in orders for number in range(order.num_microbatches) for k in order.numbers(0, number)
    ]
    assert sorted(read) == list(range(total))
    assert all(len(order.numbers(0, order.num_microbatches)) == 0 for order in orders)
