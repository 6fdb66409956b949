"""Values that are suddenly far larger than before: a loss or a gradient norm that points at bad data or bad hardware.

    the first 100 steps of a start: the largest is kept          later: more than 10 times that is told

The numbers 100 and 10 are Megatron-LM's.
"""

from __future__ import annotations

import math

STEPS_THAT_COUNT = 100
FACTOR = 10.0


class SpikeWatch:
    """Watches one value. `name`: for the user."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.largest = 0.0
        self._num_seen = 0

    def look(self, value: float) -> str | None:
        """What to tell about the value of a step, if anything. Values that are not finite are another matter."""
        if not math.isfinite(value):
            return None
        if self._num_seen < STEPS_THAT_COUNT:
            self._num_seen += 1
            self.largest = max(self.largest, abs(value))
            return None
        if abs(value) < FACTOR * self.largest:
            return None
        return (
            f"{self.name} {value:.6g} is more than {FACTOR:.0f} times the largest of the first {STEPS_THAT_COUNT} steps,"
            f" {self.largest:.6g}"
        )
