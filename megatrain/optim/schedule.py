"""The learning rate as a function of the samples consumed before the step.

Warm-up from `init` to `peak`, then a decay to `floor`. The rules are Megatron-LM's, so that its runs continue alike:
the first iteration runs at `init`, and a constant rate stays at `peak` after the decay's end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Counted in samples."""

    style: Literal["constant", "linear", "cosine"]
    peak: float
    floor: float
    init: float
    warmup_samples: float
    decay_samples: float

    def at(self, samples: int) -> float:
        """Rate of the step that starts after `samples` samples."""
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            return self.init + (self.peak - self.init) * samples / self.warmup_samples
        if self.style == "constant":
            return self.peak
        if samples > self.decay_samples:
            return self.floor
        ratio = (samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        share = 1.0 - ratio if self.style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)
        return self.floor + share * (self.peak - self.floor)
