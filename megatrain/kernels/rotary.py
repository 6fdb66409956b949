"""Rotary position embeddings: wavelengths, their stretching for longer sequences, and tables.

    base, channels ──> inverse wavelengths ──> stretched (linear, Llama 3, YaRN) ──> cos and sin of each position

Sources: RoFormer, arXiv:2104.09864; YaRN, arXiv:2309.00071; the Llama 3 rule is that of its release.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LlamaScaling:
    """Long waves are stretched by `factor`, short ones stay, and between them it changes smoothly."""

    factor: float
    low: float = 1.0
    """Waves that turn no more often than this over the original length are stretched whole."""
    high: float = 4.0
    """Waves that turn at least this often stay."""
    original_length: int = 8192


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Channels that turn often over the original length stay, slow ones are stretched, with a ramp over channels."""

    factor: float
    original_length: int
    beta_fast: float = 32.0
    """Turns over the original length from which on a channel stays."""
    beta_slow: float = 1.0
    """Turns up to which a channel is stretched whole."""
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    rounds_range: bool = True
    """Whether the ramp starts and ends at whole channels."""

    @property
    def concentration(self) -> float:
        """What queries and keys are multiplied with."""
        return _concentration(self.factor, self.mscale) / _concentration(self.factor, self.mscale_all_dim)


@dataclass(frozen=True, kw_only=True)
class RotarySpec:
    """One kind of rotary embedding."""

    base: float
    share: float = 1.0
    """Of a head's channels that are turned; the others pass."""
    is_interleaved: bool = False
    """Whether neighbouring channels pair up, not those half the turned channels apart."""
    interpolation: float = 1.0
    """Positions are divided by this."""
    scaling: LlamaScaling | YarnScaling | None = None

    def turned_channels(self, head_channels: int) -> int:
        """How many channels of a head are turned."""
        return int(head_channels * self.share)


def tables(
    spec: RotarySpec, head_channels: int, positions: Tensor, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles at each of the positions [s], each [s, 1, 1, turned channels / 2] in `dtype`."""
    channels = spec.turned_channels(head_channels)
    exponents = torch.arange(0, channels, 2, dtype=torch.float64, device=positions.device) / channels
    frequencies = spec.base**-exponents
    scale = 1.0
    match spec.scaling:
        case LlamaScaling():
            frequencies = _llama(frequencies, spec.scaling)
        case YarnScaling():
            frequencies = _yarn(frequencies, spec.base, spec.scaling)
            scale = spec.scaling.concentration
    angles = torch.outer(positions.double() / spec.interpolation, frequencies)[:, None, None, :]
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def _llama(frequencies: Tensor, scaling: LlamaScaling) -> Tensor:
    turns = scaling.original_length * frequencies / (2 * math.pi)
    kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _yarn(frequencies: Tensor, base: float, scaling: YarnScaling) -> Tensor:
    pairs = frequencies.numel()

    def pair_of(turns: float) -> float:
        """Number of the pair of channels that turns this often over the original length."""
        return pairs * math.log(scaling.original_length / (turns * 2 * math.pi)) / math.log(base)

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.rounds_range:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(pairs, device=frequencies.device) - low) / (high - low)).clamp(0, 1)
    return frequencies * (1 - stretched + stretched / scaling.factor)


def _concentration(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
