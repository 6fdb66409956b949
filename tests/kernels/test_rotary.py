"""Rotary tables and pairings: known angles, the rules of stretching at their landmarks, gradients."""

import math

import pytest
import torch

from megatrain.kernels.rotary import LlamaScaling, RotarySpec, YarnScaling, cos_sin_tables

CPU = torch.device("cpu")


def _angles(spec: RotarySpec, channels: int = 64, position: int = 1) -> torch.Tensor:
    """Of one position, by atan2; small enough to be unique."""
    cos, sin = cos_sin_tables(spec, channels, torch.arange(position + 1, device=CPU), dtype=torch.float64)
    return torch.atan2(sin, cos)[position, 0, 0]


def test_wavelengths_are_powers_of_the_base() -> None:
    expected = 10000.0 ** (-torch.arange(0, 64, 2).double() / 64)
    torch.testing.assert_close(_angles(RotarySpec(base=10000.0)), expected)


def test_a_share_of_the_channels_has_wavelengths_of_its_own() -> None:
    expected = 10000.0 ** (-torch.arange(0, 16, 2).double() / 16)
    torch.testing.assert_close(_angles(RotarySpec(base=10000.0, rotary_percent=0.25)), expected)


def test_interpolation_divides_positions() -> None:
    plain, slow = RotarySpec(base=10000.0), RotarySpec(base=10000.0, interpolation=4)
    torch.testing.assert_close(_angles(slow), _angles(plain) / 4)


def test_llama_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
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


def test_yarn_keeps_fast_channels_stretches_slow_ones_and_concentrates() -> None:
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
    turns = 4096 * plain / (2 * math.pi)
    torch.testing.assert_close(scaled[turns > 40], plain[turns > 40])
    torch.testing.assert_close(scaled[turns < 0.8], plain[turns < 0.8] / 16)
    assert ((scaled / plain).diff() <= 1e-12).all()
