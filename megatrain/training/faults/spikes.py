"""Detection of spikes in the loss or the gradient norm, which can come from bad data or bad hardware.

    first 100 steps after a start: record the largest value          later steps: report more than 10 times that value

The numbers 100 and 10 are Megatron-LM's.
"""

from __future__ import annotations

import math

REFERENCE_STEPS = 100
FACTOR = 10.0


class SpikeDetector:
    """Detector of spikes in one value. `name`: its name in the report."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.largest = 0.0
        self._num_seen = 0

    @property
    def limit(self) -> float:
        """The smallest value that is a spike; infinite during the first steps."""
        return FACTOR * self.largest if self._num_seen >= REFERENCE_STEPS else math.inf

    def check(self, value: float) -> str | None:
        """Return a sentence if the value of this step is a spike. Values that are not finite are ignored."""
        if not math.isfinite(value):
            return None
        if self._num_seen < REFERENCE_STEPS:
            self._num_seen += 1
            self.largest = max(self.largest, abs(value))
            return None
        if abs(value) < self.limit:
            return None
        return (
            f"{self.name} {value:.6g} is more than {FACTOR:.0f} times the largest of the first {REFERENCE_STEPS} steps,"
            f" {self.largest:.6g}"
        )
