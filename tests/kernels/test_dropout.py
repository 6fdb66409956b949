"""Dropout's mask depends on key and place alone."""

import pytest
import torch

from megatrain.kernels.random import keep_mask, stream_key

KEY = stream_key(7, "decoder.layers.0.attention.dropout")


def test_a_rank_that_holds_some_rows_keeps_what_the_whole_keeps() -> None:
    rows = torch.arange(40).view(10, 4)
    whole = keep_mask(rows, 13, key=KEY, p=0.3)
    assert whole.shape == (10, 4, 13)
    assert torch.equal(keep_mask(rows[5:], 13, key=KEY, p=0.3), whole[5:])
    assert torch.equal(keep_mask(rows.t(), 13, key=KEY, p=0.3), whole.transpose(0, 1))


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.arange(50)
    whole = keep_mask(rows, 9, key=KEY, p=0.5)
    monkeypatch.setattr("megatrain.kernels.random.ROW_CHUNK_COUNTERS", 7)
    assert torch.equal(keep_mask(rows, 9, key=KEY, p=0.5), whole)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_p(p: float) -> None:
    kept = keep_mask(torch.arange(2000), 500, key=KEY, p=p)
    assert 1 - kept.double().mean().item() == pytest.approx(p, abs=0.002)


def test_layers_and_rows_differ() -> None:
    rows = torch.arange(100)
    one, other = (keep_mask(rows, 64, key=stream_key(7, name), p=0.5) for name in ("a", "b"))
    assert (one == other).double().mean().item() == pytest.approx(0.5, abs=0.03)
    assert (one[:-1] == one[1:]).double().mean().item() == pytest.approx(0.5, abs=0.03)
