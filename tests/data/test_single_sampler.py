"""The `single` order: recorded sample numbers of every rank."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import EXPECTED

from megatrain.data.sampler import single


@pytest.mark.parametrize("case", EXPECTED["samplers"]["single"])
def test_recorded_order(case):
    per_step = case["num_micro_batches"]
    for rank, recorded in enumerate(case["ranks"]):
        flat = list(itertools.chain.from_iterable(recorded))
        for number, expected in enumerate([*flat, []]):
            step, microbatch = divmod(number, per_step)
            found = single(
                case["consumed_samples"] + step * case["global_batch_size"],
                microbatch,
                micro_batch_size=case["micro_batch_size"],
                dp_rank=rank,
                dp_size=case["data_parallel_size"],
                total_samples=case["total_samples"],
                drop_last=case["drop_last"],
            )
            assert list(found) == expected


@given(
    consumed=st.integers(0, 50),
    total=st.integers(0, 90),
    size=st.integers(1, 5),
    dp_size=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_every_sample_is_read_once(consumed, total, size, dp_size, drop_last):
    read = [
        number
        for microbatch in range(100)
        for rank in range(dp_size)
        for number in single(
            consumed,
            microbatch,
            micro_batch_size=size,
            dp_rank=rank,
            dp_size=dp_size,
            total_samples=total,
            drop_last=drop_last,
        )
    ]
    left = max(0, total - consumed)
    assert read == list(range(consumed, consumed + (left - left % (size * dp_size) if drop_last else left)))
