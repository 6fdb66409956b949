"""RoPE: known angles, scaling rules at their landmarks, relative positions, both pairings, gradients."""

import math

import pytest
import torch

from megatrain.config.model_spec.rotary import LlamaScaling, RotarySpec, YarnScaling
from megatrain.kernels.rotary import apply_rope, apply_rope_to_qkv, apply_rope_to_qkv_backward, cos_sin_tables

CPU = torch.device("cpu")


def _angles(spec: RotarySpec, channels: int = 64, position: int = 1) -> torch.Tensor:
    """Return the angles of one position by atan2; they are small enough to be unique."""
    cos, sin = cos_sin_tables(spec, channels, torch.arange(position + 1, device=CPU), dtype=torch.float64)
    return torch.atan2(sin, cos)[position, 0, 0]


def test_frequencies_are_powers_of_the_base() -> None:
    expected = 10000.0 ** (-torch.arange(0, 64, 2).double() / 64)
    torch.testing.assert_close(_angles(RotarySpec(base=10000.0)), expected)


def test_frequencies_depend_on_the_rotary_channels_alone() -> None:
    expected = 10000.0 ** (-torch.arange(0, 16, 2).double() / 16)
    torch.testing.assert_close(_angles(RotarySpec(base=10000.0, rotary_percent=0.25)), expected)


def test_interpolation_divides_positions() -> None:
    plain, slow = RotarySpec(base=10000.0), RotarySpec(base=10000.0, interpolation=4)
    torch.testing.assert_close(_angles(slow), _angles(plain) / 4)


def test_llama_scaling_keeps_high_frequencies_and_scales_low_ones() -> None:
    plain = _angles(RotarySpec(base=500000.0), 128)
    scaled = _angles(RotarySpec(base=500000.0, scaling=LlamaScaling(factor=8)), 128)
    wavelength = 2 * math.pi / plain
    is_short, is_long = wavelength < 8192 / 4, wavelength > 8192 / 1
    assert 0 < is_short.sum() < 64
    assert 0 < is_long.sum() < 64
    torch.testing.assert_close(scaled[is_short], plain[is_short])
    torch.testing.assert_close(scaled[is_long], plain[is_long] / 8)
    between = ~is_short & ~is_long
    smooth = (8192 / wavelength[between] - 1) / 3
    torch.testing.assert_close(scaled[between], plain[between] * (smooth + (1 - smooth) / 8))


def test_yarn_keeps_fast_channels_scales_slow_ones_and_the_softmax() -> None:
    scaling = YarnScaling(factor=16, original_length=4096)
    plain = _angles(RotarySpec(base=10000.0), 128)
    cos, sin = cos_sin_tables(
        RotarySpec(base=10000.0, scaling=scaling), 128, torch.arange(2, device=CPU), dtype=torch.float64
    )
    torch.testing.assert_close(
        (cos**2 + sin**2)[1, 0, 0], torch.full((64,), scaling.concentration**2).double()
    )
    assert scaling.concentration == pytest.approx(0.1 * math.log(16) + 1)
    scaled = torch.atan2(sin, cos)[1, 0, 0]
    periods = 4096 * plain / (2 * math.pi)
    torch.testing.assert_close(scaled[periods > 40], plain[periods > 40])
    torch.testing.assert_close(scaled[periods < 0.8], plain[periods < 0.8] / 16)
    assert ((scaled / plain).diff() <= 1e-12).all()


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def _tables(length: int, channels: int = 8, rotary_percent: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    spec = RotarySpec(base=100.0, rotary_percent=rotary_percent)
    return cos_sin_tables(spec, channels, torch.arange(length), dtype=torch.float64)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rope_keeps_norms_and_depends_on_relative_positions(is_interleaved: bool) -> None:
    q, k = (_random(n, 1, 1, 8)[:1].expand(16, 1, 1, 8) for n in (1, 2))
    q, k = (apply_rope(x, *_tables(16), is_interleaved=is_interleaved) for x in (q, k))
    torch.testing.assert_close(q.norm(dim=-1), q[:1].norm(dim=-1).expand(16, 1, 1))
    scores = torch.einsum("ibnd,jbnd->ij", q, k)
    torch.testing.assert_close(scores[3, 1], scores[9, 7])
    assert not torch.isclose(scores[3, 1], scores[3, 2])


def test_pairings_differ_by_the_order_of_channels() -> None:
    x = _random(6, 2, 3, 8)
    halves = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    rotated = apply_rope(halves, *_tables(6), is_interleaved=False)
    expected = torch.stack(rotated.chunk(2, -1), -1).flatten(-2)
    torch.testing.assert_close(apply_rope(x, *_tables(6), is_interleaved=True), expected)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(
    ("rotary_percent", "sizes"), [(1.0, (3, 2, 2)), (0.5, (3, 2, 2)), (1.0, (4, 2, 2, 4))]
)
def test_rope_of_a_qkv_projection_and_its_gradient(
    is_interleaved: bool, rotary_percent: float, sizes: tuple[int, ...]
) -> None:
    cos, sin = _tables(5, rotary_percent=rotary_percent)
    x = _random(5, 2, sum(sizes), 8).requires_grad_()
    q, k, *others = x.split(list(sizes), dim=2)
    expected = [apply_rope(one, cos, sin, is_interleaved=is_interleaved) for one in (q, k)] + others
    if rotary_percent < 1:
        torch.testing.assert_close(expected[0][..., 4:], q[..., 4:])
    upstream = [_random(5, 2, n, 8) for n in sizes]
    torch.autograd.backward(expected, upstream)
    found = apply_rope_to_qkv(x.detach(), sizes, cos, sin, is_interleaved=is_interleaved)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.detach())
    torch.testing.assert_close(
        apply_rope_to_qkv_backward(upstream, cos, sin, is_interleaved=is_interleaved), x.grad
    )
