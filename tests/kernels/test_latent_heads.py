"""Heads of multi-latent attention: RoPE of queries, keys and values from one projection, rotary channels shared by the heads."""

import pytest
import torch
from torch import Tensor

from megatrain.config.model_spec.rotary import RotarySpec
from megatrain.kernels.latent_heads import (
    expand_keys,
    expand_keys_backward,
    rotate_queries,
)
from megatrain.kernels.rotary import apply_rope_reference, cos_sin_tables

S, B, HEADS, PLAIN, ROTARY, VALUE = 5, 2, 3, 6, 4, 7


def drawn(*shape: int) -> Tensor:
    return torch.randn(S, B, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_rope_is_applied_to_the_last_channels_of_queries(percent: float) -> None:
    spec = RotarySpec(base=100.0, rotary_percent=percent, is_interleaved=True)
    cos, sin = cos_sin_tables(spec, ROTARY, torch.arange(S), dtype=torch.float64)
    theirs = drawn(HEADS, PLAIN + ROTARY).requires_grad_()
    rotated = apply_rope_reference(theirs[..., PLAIN:], cos, sin, is_interleaved=True)
    expected = torch.cat((theirs[..., :PLAIN], rotated), -1)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    q = drawn(HEADS, PLAIN + ROTARY)
    found = rotate_queries(q, ROTARY, cos, sin, is_interleaved=True)
    assert found is q
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    dq = rotate_queries(upstream, ROTARY, cos, sin, is_interleaved=True, is_backward=True)
    assert dq is upstream
    torch.testing.assert_close(dq, theirs.grad, rtol=1e-12, atol=1e-12)


def test_all_heads_of_keys_share_the_rotary_channels() -> None:
    kv, key = (x.requires_grad_() for x in (drawn(HEADS, PLAIN + VALUE), drawn(1, ROTARY)))
    heads = [torch.cat((kv[:, :, n, :PLAIN], key[:, :, 0]), -1) for n in range(HEADS)]
    expected = torch.stack(heads, 2), kv[..., PLAIN:]
    upstream = [torch.randn_like(x) for x in expected]
    torch.autograd.backward(expected, upstream)
    k, v = expand_keys(kv.detach(), key.detach(), PLAIN)
    assert torch.equal(k, expected[0])
    assert torch.equal(v, expected[1])
    assert v.untyped_storage().data_ptr() == kv.untyped_storage().data_ptr()
    dkv, dkey = expand_keys_backward(*upstream, PLAIN)
    torch.testing.assert_close(dkv, kv.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dkey, key.grad, rtol=1e-12, atol=1e-12)
