"""Counter-based random numbers: known answers, distributions, independence of boxes and chunks; dropout masks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.kernels.random import fill_normal, inverse_normal, keep_mask, philox, stream_key

KEY = stream_key(7, "decoder.layers.0.attention.dropout")


def test_philox_has_the_authors_known_answers() -> None:
    # From kat_vectors of the Random123 library: philox4x32 10, counter and key all zero.
    words = [int(word) for word in philox(torch.zeros(4, 1, dtype=torch.int64).unbind(), 0)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_masks_are_those_of_seven_rounds() -> None:
    # From the same file: philox4x32 7, counter and key all zero; a column has the lower half of a word before the upper one.
    words = [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    assert [int(word) for word in philox(torch.zeros(4, 1, dtype=torch.int64).unbind(), 0, rounds=7)] == words
    numbers = torch.tensor([half for word in words for half in (word & 0xFFFF, word >> 16)])
    for p in (0.1, 0.3, 0.7):
        mask = keep_mask(torch.zeros((), dtype=torch.int64), 8, key=0, p=p)
        assert torch.equal(mask, numbers >= round(p * 2**16))


def test_the_quantile_is_that_of_the_normal_distribution_within_a_float32() -> None:
    bits = torch.cat((torch.arange(0, 2**32, 999_983), torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 1])))
    exact = torch.special.ndtri((bits.double() + 0.5) / 2.0**32)
    torch.testing.assert_close(inverse_normal(bits), exact, rtol=2e-7, atol=0)


def test_normal_numbers_have_the_requested_moments() -> None:
    out = torch.empty(1000, 1000)
    fill_normal(out, key=stream_key(1, "a"), first=0, row_stride=1000, mean=1.0, std=0.5)
    assert out.mean().item() == pytest.approx(1.0, abs=0.002)
    assert out.std().item() == pytest.approx(0.5, abs=0.002)
    lag_one = torch.corrcoef(torch.stack((out.flatten()[:-1], out.flatten()[1:])))[0, 1]
    assert abs(lag_one.item()) < 0.004


@settings(max_examples=60)
@given(st.data())
def test_a_box_has_the_numbers_of_the_whole_tensor(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 23))
    top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    height, width = data.draw(st.integers(1, rows - top)), data.draw(st.integers(1, columns - left))
    whole, box = torch.empty(rows, columns), torch.empty(height, width)
    fill_normal(whole, key=7, first=0, row_stride=columns)
    fill_normal(box, key=7, first=top * columns + left, row_stride=columns)
    assert torch.equal(box, whole[top : top + height, left : left + width])


def test_chunks_do_not_change_normal_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = torch.empty(50, 41), torch.empty(50, 41)
    fill_normal(whole, key=3, first=0, row_stride=41)
    monkeypatch.setattr("megatrain.kernels.random.NORMAL_CHUNK_COUNTERS", 4)
    fill_normal(cut, key=3, first=0, row_stride=41)
    assert torch.equal(whole, cut)


def test_seed_and_name_select_the_stream() -> None:
    assert len({stream_key(seed, name) for seed in (1, 2) for name in ("a", "b")}) == 4


def test_bf16_has_the_rounded_fp32_numbers() -> None:
    fp32, bf16 = torch.empty(3, 64), torch.empty(3, 64, dtype=torch.bfloat16)
    fill_normal(fp32, key=3, first=0, row_stride=64)
    fill_normal(bf16, key=3, first=0, row_stride=64)
    assert torch.equal(fp32.bfloat16(), bf16)


def test_a_dropout_mask_of_some_rows_is_part_of_the_whole() -> None:
    rows = torch.arange(40).view(10, 4)
    whole = keep_mask(rows, 13, key=KEY, p=0.3)
    assert whole.shape == (10, 4, 13)
    assert torch.equal(keep_mask(rows[5:], 13, key=KEY, p=0.3), whole[5:])
    assert torch.equal(keep_mask(rows.t(), 13, key=KEY, p=0.3), whole.transpose(0, 1))


def test_chunks_do_not_change_dropout_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.arange(50)
    whole = keep_mask(rows, 9, key=KEY, p=0.5)
    monkeypatch.setattr("megatrain.kernels.random.ROW_CHUNK_COUNTERS", 7)
    assert torch.equal(keep_mask(rows, 9, key=KEY, p=0.5), whole)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_the_dropped_fraction_is_p(p: float) -> None:
    kept = keep_mask(torch.arange(2000), 500, key=KEY, p=p)
    assert 1 - kept.double().mean().item() == pytest.approx(p, abs=0.002)


def test_dropout_masks_of_layers_and_rows_differ() -> None:
    rows = torch.arange(100)
    one, other = (keep_mask(rows, 64, key=stream_key(7, name), p=0.5) for name in ("a", "b"))
    assert (one == other).double().mean().item() == pytest.approx(0.5, abs=0.03)
    assert (one[:-1] == one[1:]).double().mean().item() == pytest.approx(0.5, abs=0.03)
