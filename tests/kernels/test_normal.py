"""The generator of initial weights: known answers, the right distribution, the same numbers in every cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.kernels.random import fill_normal, inverse_normal, philox, stream_key


def test_philox_gives_the_authors_known_answers() -> None:
    # From kat_vectors of the Random123 library: philox4x32 10, counter and key all zero.
    words = [int(word) for word in philox(torch.zeros(1, dtype=torch.int64), 0)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_the_quantile_is_that_of_the_normal_distribution_within_a_float32() -> None:
    bits = torch.cat((torch.arange(0, 2**32, 999_983), torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 1])))
    exact = torch.special.ndtri((bits.double() + 0.5) / 2.0**32)
    torch.testing.assert_close(inverse_normal(bits), exact, rtol=2e-7, atol=0)


def test_the_numbers_have_the_moments_that_were_asked_for() -> None:
    out = torch.empty(1000, 1000)
    fill_normal(out, key=stream_key(1, "a"), first=0, row_stride=1000, mean=1.0, std=0.5)
    assert out.mean().item() == pytest.approx(1.0, abs=0.002)
    assert out.std().item() == pytest.approx(0.5, abs=0.002)
    neighbours = torch.corrcoef(torch.stack((out.flatten()[:-1], out.flatten()[1:])))[0, 1]
    assert abs(neighbours.item()) < 0.004


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_box_gets_what_the_whole_tensor_has_there(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 23))
    top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    height, width = data.draw(st.integers(1, rows - top)), data.draw(st.integers(1, columns - left))
    whole, box = torch.empty(rows, columns), torch.empty(height, width)
    fill_normal(whole, key=7, first=0, row_stride=columns)
    fill_normal(box, key=7, first=top * columns + left, row_stride=columns)
    assert torch.equal(box, whole[top : top + height, left : left + width])


def test_chunking_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = torch.empty(50, 41), torch.empty(50, 41)
    fill_normal(whole, key=3, first=0, row_stride=41)
    monkeypatch.setattr("megatrain.kernels.random.NORMAL_CHUNK_COUNTERS", 4)
    fill_normal(cut, key=3, first=0, row_stride=41)
    assert torch.equal(whole, cut)


def test_seed_and_name_make_other_streams() -> None:
    assert len({stream_key(seed, name) for seed in (1, 2) for name in ("a", "b")}) == 4


def test_bfloat16_gets_the_rounded_float32_numbers() -> None:
    wide, narrow = torch.empty(3, 64), torch.empty(3, 64, dtype=torch.bfloat16)
    fill_normal(wide, key=3, first=0, row_stride=64)
    fill_normal(narrow, key=3, first=0, row_stride=64)
    assert torch.equal(wide.bfloat16(), narrow)
