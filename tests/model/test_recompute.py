"""Recomputation saves less for the backward pass and changes no bit."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from everyday import one_in
from tiny_gradients import tiny_gradients

from megatrain.model.implementations.mlp_chunks import ChunkedMlp
from megatrain.model.recompute import discarded
from megatrain.tools.parity.measure import local_batches
from megatrain.tools.parity.rows import OPTIONS, Layout


def run(recompute: str, model: str, *flags: str) -> tuple[torch.Tensor, int]:
    """Return the gradients, and the number of bytes that forward passes save (recomputed parts save theirs separately)."""
    kept = 0

    def count(x: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        found = tiny_gradients(f"{recompute} {model}", *flags)
    return found, kept


@pytest.mark.parametrize("model", one_in(2, ["llama", "gpt2"]))
def test_gradients_are_the_same_bits_and_less_is_saved(model: str) -> None:
    expected, all_of_it = run("norecompute", model)
    others = {"recomputemoe", "recomputeshared", "chunkedmlp"}
    found = {name: run(name, model) for name in OPTIONS["recomputation"] if name not in others}
    for name in ("block", "selective", "recomputenorms"):
        assert torch.equal(found[name][0], expected), name
    chunked = found["uniform"][0]  # chunks are segments, so parameters have another order
    assert torch.equal(chunked[chunked != 0].sort().values, expected[expected != 0].sort().values)
    kept = {name: bytes_kept for name, (_, bytes_kept) in found.items()}
    assert kept["uniform"] < kept["selective"] < all_of_it
    assert kept["uniform"] < kept["block"] < all_of_it
    assert kept["uniform"] < kept["recomputenorms"] < all_of_it


@pytest.mark.parametrize(("word", "num_mlps"), [("", 4), ("lora", 4), ("mtprepeated", 6)])
@pytest.mark.parametrize("recompute", ["norecompute", "selective", "block"])
def test_an_mlp_in_chunks_of_tokens_equals_the_whole(
    recompute: str, word: str, num_mlps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums over the chunks of an fp64 gradient round differently; a recomputed layer computes each chunk only where it is needed."""
    calls: list[int] = []
    whole = ChunkedMlp.linears

    def counted(mlp: ChunkedMlp, residual: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(len(residual))
        return whole(mlp, residual, *rest)

    monkeypatch.setattr(ChunkedMlp, "linears", counted)
    expected, _ = run(recompute, f"llama {word}")
    assert not calls
    found, _ = run(recompute, f"llama {word}", "--mlp-chunks-for-training", "3")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14 * expected.abs().max().item())
    passes = num_mlps * len(list(local_batches(0, Layout.of(f"{recompute} llama"), 0)))
    assert calls == [8] * 3 * 2 * passes  # 24 tokens, in a forward pass and once in the backward pass


@pytest.mark.parametrize("model", one_in(2, ["mla", "mlav2"]))
def test_gradients_are_the_same_bits_with_recomputed_latents(model: str) -> None:
    expected, _ = run("norecompute", model)
    for name in ("block", "selective", "recomputenorms", "recomputelatents"):
        assert torch.equal(run(name, model)[0], expected), name


@pytest.mark.parametrize("is_discarded", [True, False])
def test_a_discarded_tensor_is_freed_and_computed_once_more(is_discarded: bool) -> None:
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    calls = []

    def recomputed() -> list[torch.Tensor]:
        calls.append(torch.is_grad_enabled())
        return [x.detach() * 2]

    heads = x * 2
    with discarded([heads], recomputed) if is_discarded else nullcontext():
        y = (heads.sin() + heads[:, 1:].square().sum()) * torch.arange(4.0)
    freed = weakref.ref(heads)
    del heads
    gc.collect()
    assert (freed() is None) == is_discarded
    y.sum().backward()
    assert calls == ([False] if is_discarded else [])
    weights = torch.arange(4.0, dtype=torch.float64)
    expected = 2 * (2 * x).cos() * weights
    expected[:, 1:] += 8 * x[:, 1:] * weights.sum() * len(x)
    torch.testing.assert_close(x.grad, expected.detach())
