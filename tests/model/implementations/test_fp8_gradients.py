"""Weight gradients in FP8, which the GEMM of a layer overwrites where nothing was added to them before."""

from __future__ import annotations

import pytest
import torch
from tiny_gradients import tiny_gradients

from megatrain.kernels.linear import FirstWrite


@pytest.mark.parametrize("words", ["fp8tensorwise mtp2 mtprepeated", "fp8blockwise mtp2 mtprepeated"])
def test_a_layer_that_a_micro_batch_uses_twice_adds_both_gradients(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tiny_gradients(words)
    monkeypatch.setattr(FirstWrite, "take", lambda *_: False)
    assert torch.equal(found, tiny_gradients(words))
