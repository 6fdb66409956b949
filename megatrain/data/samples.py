"""What the datasets of this folder have in common: numbered samples.

`GptSamples` cuts them out of text, `BlendedSamples` mixes several of those, `PlannedSamples` follows one by another;
`BatchLoader` reads any of them.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Sample:
    """One sample of s tokens."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.float32]
    """1 where the label counts."""
    position_ids: npt.NDArray[np.int64]
    document_starts: npt.NDArray[np.int64]
    """Where the stretches begin that attention stays inside of, ascending, the first at 0."""


class Samples(Protocol):
    """Numbered samples. Sample k is the same whenever and wherever it is read."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, k: int, /) -> Sample:
        """Sample k."""


class PlannedSamples:
    """The samples of a first plan, then those of the plans that were appended to it when training grew longer."""

    def __init__(self, plans: Sequence[Samples], num_planned: Sequence[int]) -> None:
        """Join plans; of all but the last, which may be read to its end, the first `num_planned` samples count."""
        self.plans = tuple(plans)
        self._starts = [0, *itertools.accumulate(num_planned[:-1])]

    def __len__(self) -> int:
        """Samples of all plans."""
        return self._starts[-1] + len(self.plans[-1])

    def __getitem__(self, k: int) -> Sample:
        """Sample k, counted from the first plan on."""
        if not 0 <= k < len(self):
            raise IndexError(f"sample {k} of {len(self)}")
        plan = bisect.bisect_right(self._starts, k) - 1
        return self.plans[plan][k - self._starts[plan]]
