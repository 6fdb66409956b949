"""Recomputation saves less for the backward pass and changes no bit."""

from __future__ import annotations

import pytest
import torch

from megatrain.tools.parity.measure import engine_of, own_batches, tiny_plan
from megatrain.tools.parity.rows import OPTIONS, Layout


def run(recompute: str, model: str) -> tuple[torch.Tensor, int]:
    """Return the gradients, and the number of bytes that forward passes save (recomputed parts save theirs separately)."""
    layout = Layout.of(f"{recompute} {model}")
    engine = engine_of(tiny_plan(layout, 1), 0)
    kept = 0

    def count(x: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        engine.accumulate_gradients(list(own_batches(0, layout, 0)), first_sample=8)
    return torch.cat(engine.buffers.gradients.full), kept


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_gradients_are_the_same_bits_and_less_is_saved(model: str) -> None:
    expected, all_of_it = run("norecompute", model)
    of_experts = {"recomputemoe", "recomputeshared"}
    found = {name: run(name, model) for name in OPTIONS["recomputation"] if name not in of_experts}
    for name in ("block", "selective", "recomputenorms"):
        assert torch.equal(found[name][0], expected), name
    chunked = found["uniform"][0]  # chunks are segments, so parameters have another order
    assert torch.equal(chunked[chunked != 0].sort().values, expected[expected != 0].sort().values)
    kept = {name: bytes_kept for name, (_, bytes_kept) in found.items()}
    assert kept["uniform"] < kept["selective"] < all_of_it
    assert kept["uniform"] < kept["block"] < all_of_it
    assert kept["uniform"] < kept["recomputenorms"] < all_of_it
