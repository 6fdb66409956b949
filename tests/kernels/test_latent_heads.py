"""Heads of multi-latent attention: keys and values from one projection, rotary channels shared by the heads, gradients."""

import pytest
import torch
from torch import Tensor

from megatrain.kernels.latent_heads import Heads, expand_heads, expand_heads_backward
from megatrain.kernels.rotary import RotarySpec, apply_rope_reference, cos_sin_tables

S, B, HEADS, PLAIN, ROTARY, VALUE = 5, 2, 3, 6, 4, 7


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Return q, kv and key."""
    generator = torch.Generator().manual_seed(2)
    shapes = (S, B, HEADS, PLAIN + ROTARY), (S, B, HEADS, PLAIN + VALUE), (S, B, ROTARY)
    q, kv, key = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return q, kv, key


def by_head(q: Tensor, kv: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Heads:
    """Expand head by head, with differentiable operators."""

    def rotated(x: Tensor) -> Tensor:
        return apply_rope_reference(x.unsqueeze(2), cos, sin, is_interleaved=True).squeeze(2)

    heads = [
        (
            torch.cat((q[:, :, n, :PLAIN], rotated(q[:, :, n, PLAIN:])), -1),
            torch.cat((kv[:, :, n, :PLAIN], rotated(key)), -1),
            kv[:, :, n, PLAIN:],
        )
        for n in range(HEADS)
    ]
    return Heads(*(torch.stack(parts, 2) for parts in zip(*heads, strict=True)))


@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_heads_and_gradients_are_those_of_single_heads(percent: float) -> None:
    spec = RotarySpec(base=100.0, rotary_percent=percent, is_interleaved=True)
    cos, sin = cos_sin_tables(spec, ROTARY, torch.arange(S), dtype=torch.float64)
    theirs = [x.requires_grad_() for x in inputs()]
    expected = by_head(*theirs, cos, sin)
    upstream = Heads(*(torch.randn_like(x) for x in expected))
    torch.autograd.backward(list(expected), list(upstream))
    found = expand_heads(*inputs(), cos, sin, is_interleaved=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    gradients = expand_heads_backward(upstream, ROTARY, cos, sin, is_interleaved=True)
    for gradient, their in zip(gradients, theirs, strict=True):
        torch.testing.assert_close(gradient, their.grad, rtol=1e-12, atol=1e-12)


def test_values_are_a_view_and_queries_stay_in_place() -> None:
    q, kv, key = inputs()
    tables = cos_sin_tables(RotarySpec(base=100.0), ROTARY, torch.arange(S), dtype=torch.float64)
    found = expand_heads(q, kv, key, *tables, is_interleaved=True)
    assert found.q is q
    assert found.v.untyped_storage().data_ptr() == kv.untyped_storage().data_ptr()
