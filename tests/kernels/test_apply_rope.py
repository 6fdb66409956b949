"""Turned heads: lengths, relative positions, both pairings, channels that pass, gradients."""

import pytest
import torch

from megatrain.kernels.rotary import (
    RotarySpec,
    apply_rope,
    apply_rope_to_qkv,
    apply_rope_to_qkv_backward,
    cos_sin_tables,
)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def _tables(length: int, channels: int = 8, share: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    spec = RotarySpec(base=100.0, rotary_percent=share)
    return cos_sin_tables(spec, channels, torch.arange(length), dtype=torch.float64)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_a_turn_keeps_lengths_and_turns_by_relative_position(is_interleaved: bool) -> None:
    q, k = (_random(n, 1, 1, 8)[:1].expand(16, 1, 1, 8) for n in (1, 2))
    q, k = (apply_rope(x, *_tables(16), is_interleaved=is_interleaved) for x in (q, k))
    torch.testing.assert_close(q.norm(dim=-1), q[:1].norm(dim=-1).expand(16, 1, 1))
    scores = torch.einsum("ibnd,jbnd->ij", q, k)
    torch.testing.assert_close(scores[3, 1], scores[9, 7])
    assert not torch.isclose(scores[3, 1], scores[3, 2])


def test_pairings_differ_by_the_order_of_channels() -> None:
    x = _random(6, 2, 3, 8)
    halves = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    turned = apply_rope(halves, *_tables(6), is_interleaved=False)
    expected = torch.stack(turned.chunk(2, -1), -1).flatten(-2)
    torch.testing.assert_close(apply_rope(x, *_tables(6), is_interleaved=True), expected)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_queries_and_keys_are_turned_and_the_turn_back_is_the_gradient(
    is_interleaved: bool, share: float
) -> None:
    cos, sin = _tables(5, share=share)
    x, sizes = _random(5, 2, 7, 8).requires_grad_(), (3, 2, 2)
    q, k, v = x.split(list(sizes), dim=2)
    expected = [apply_rope(one, cos, sin, is_interleaved=is_interleaved) for one in (q, k)] + [v]
    if share < 1:
        torch.testing.assert_close(expected[0][..., 4:], q[..., 4:])
    upstream = [_random(5, 2, n, 8) for n in sizes]
    torch.autograd.backward(expected, upstream)
    found = apply_rope_to_qkv(x.detach(), sizes, cos, sin, is_interleaved=is_interleaved)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.detach())
    torch.testing.assert_close(
        apply_rope_to_qkv_backward(upstream, cos, sin, is_interleaved=is_interleaved), x.grad
    )
