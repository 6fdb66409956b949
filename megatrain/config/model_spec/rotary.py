"""Rotary position embedding (RoPE) as data: its base, and the scaling of its frequencies for longer sequences.

`kernels/rotary.py` has the formulas and the sources.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LlamaScaling:
    """Llama 3 scaling: divides low frequencies by `factor`, keeps high ones, interpolates smoothly between them."""

    factor: float
    low_freq_factor: float = 1.0
    """Frequencies with at most this many periods over the original length are divided by the whole factor."""
    high_freq_factor: float = 4.0
    """Frequencies with at least this many periods over the original length are kept."""
    original_length: int = 8192


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN scaling: keeps fast channels, divides slow ones by `factor`, with a linear ramp over channels between them."""

    factor: float
    original_length: int
    beta_fast: float = 32.0
    """Periods over the original length from which a channel is kept."""
    beta_slow: float = 1.0
    """Periods over the original length up to which a channel is divided by the whole factor."""
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    rounds_range: bool = True
    """True: the ramp starts and ends at whole channels."""

    @property
    def concentration(self) -> float:
        """Factor on queries and keys (YaRN's attention temperature)."""
        return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's attention temperature of one scale."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, kw_only=True)
class RotarySpec:
    """One kind of rotary embedding."""

    base: float
    rotary_percent: float = 1.0
    """Fraction of a head's channels that are rotated; the others pass through."""
    is_interleaved: bool = False
    """True: adjacent channels form a pair. False: channels i and i + c/2 do."""
    interpolation: float = 1.0
    """Divisor of positions."""
    scaling: LlamaScaling | YarnScaling | None = None

    def rotary_dim(self, head_dim: int) -> int:
        """Return the number of rotated channels of a head."""
        return int(head_dim * self.rotary_percent)
