"""Column sums that dropout, activations and attention leave are the gradients of the biases before them."""

from __future__ import annotations

import pytest
import torch
from tiny_gradients import tiny_gradients

from megatrain.kernels.fp8.quantize import Amax
from megatrain.kernels.sums import ColumnSums
from megatrain.model import gpt


@pytest.mark.parametrize("model", ["gpt2", "t5"])
def test_sums_that_are_left_change_no_gradient(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used = 0

    def take(self: ColumnSums) -> tuple[torch.Tensor, ...]:
        nonlocal used
        parts, self.parts = self.parts, ()
        used += bool(parts)
        return parts

    with monkeypatch.context() as patched:
        patched.setattr(gpt, "leave_sums_and_amaxes", lambda _: None)
        expected = tiny_gradients(model)
    monkeypatch.setattr(ColumnSums, "take", take)
    torch.testing.assert_close(tiny_gradients(model), expected, rtol=1e-12, atol=1e-14)
    assert used >= 3 * 2, "the projection, fc1 and fc2 of two layers and more"


@pytest.mark.parametrize("words", ["fp8tensorwise", "tp1 llama fp8tensorwise"])
def test_the_largest_value_that_an_activation_leaves_is_that_of_the_gradient(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = 0

    def take(self: Amax) -> torch.Tensor | None:
        nonlocal used
        value, self.value = self.value, None
        used += value is not None
        return value

    with monkeypatch.context() as patched:
        patched.setattr(gpt, "leave_sums_and_amaxes", lambda _: None)
        expected = tiny_gradients(words)
    monkeypatch.setattr(Amax, "take", take)
    assert torch.equal(tiny_gradients(words), expected)
    assert used >= 2 * 2, "fc1 of each layer and micro-batch"
