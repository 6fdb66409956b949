"""Attention with masks of keys and a bias: SDPA and eager attention agree, and padding has no effect."""

import pytest
import torch
from torch import Tensor

from megatrain.kernels.attention.masked import eager_masked_attention, masked_attention

SCALE = 0.4


def inputs(num_keys: int, groups: int) -> tuple[Tensor, ...]:
    """Queries, keys and values of 2 samples, 4 heads of 8 channels, and a bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 2, 4, 8), (num_keys, 2, groups, 8), (num_keys, 2, groups, 8), (1, 4, 5, num_keys))
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes
    )


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("has_bias", [True, False])
def test_sdpa_is_eager_attention(groups: int, *, has_bias: bool) -> None:
    found = []
    for attention in (masked_attention, eager_masked_attention):
        q, k, v, bias = inputs(7, groups)
        mask = torch.arange(7) < torch.tensor([[4], [7]])
        out = attention(q, k, v, mask=mask[:, None, None], bias=bias if has_bias else None, scale=SCALE)
        out.square().sum().backward()
        found.append([out, q.grad, k.grad, v.grad, *([bias.grad] if has_bias else [])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_keys_of_padding_have_no_effect() -> None:
    q, k, v, _ = inputs(7, 4)
    mask = (torch.arange(7) < 4).expand(2, 7)[:, None, None]
    whole = masked_attention(q, k, v, mask=mask, bias=None, scale=SCALE)
    short = masked_attention(q, k[:4], v[:4], mask=None, bias=None, scale=SCALE)
    torch.testing.assert_close(whole, short, rtol=1e-10, atol=1e-12)
    whole.sum().backward()
    assert k.grad is not None
    assert not k.grad[4:].any()


def test_dropped_probabilities_have_no_part() -> None:
    q, k, v, _ = inputs(7, 4)
    kept = (torch.arange(7) != 3).expand(2, 4, 5, 7).double()
    other = v.detach().clone()
    other[3] = 100
    found = [
        eager_masked_attention(q, k, x, mask=None, bias=None, scale=SCALE, kept=kept) for x in (v, other)
    ]
    torch.testing.assert_close(*found)
