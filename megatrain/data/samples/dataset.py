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

from megatrain.config.errors import ConfigError

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


@dataclass(frozen=True)
class Piece:
    """A stretch of a stored sequence that a sample is made of."""

    source: str
    """Where the tokens come from, as `SequenceSource.name` says."""
    document: int
    sequence: int
    offset: int
    """Of its first token, in the sequence."""
    length: int
    """Tokens. The last one of a sample may be a label alone."""


class Samples(Protocol):
    """Numbered samples. Sample k is the same whenever and wherever it is read."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, k: int, /) -> Sample:
        """Sample k."""

    def origin(self, k: int, /) -> list[Piece]:
        """What sample k is made of, in order."""


class PlannedSamples:
    """The samples of a first plan, then those of the plans that were appended to it when training grew longer."""

    def __init__(self, plans: Sequence[Samples], num_planned: Sequence[int]) -> None:
        """Join plans; of all but the last, which may be read to its end, the first `num_planned` samples count.

        Raises:
            ConfigError: a plan has fewer.
        """
        for number, (plan, planned) in enumerate(zip(plans[:-1], num_planned[:-1], strict=True)):
            if len(plan) < planned:
                raise ConfigError(
                    f"plan {number} of the checkpoint is for {planned} samples, and the data gives {len(plan)}",
                    fix="give the data of the first run, or start a fresh run without --load and with another --save",
                )
        self.plans = tuple(plans)
        self._starts = [0, *itertools.accumulate(num_planned[:-1])]

    def __len__(self) -> int:
        """Samples of all plans."""
        return self._starts[-1] + len(self.plans[-1])

    def __getitem__(self, k: int) -> Sample:
        """Sample k, counted from the first plan on."""
        plan, number = self._place(k)
        return plan[number]

    def origin(self, k: int) -> list[Piece]:
        """See `Samples`."""
        plan, number = self._place(k)
        return plan.origin(number)

    def _place(self, k: int) -> tuple[Samples, int]:
        """The plan that sample k belongs to, and its number there."""
        if not 0 <= k < len(self):
            raise IndexError(f"sample {k} of {len(self)}")
        plan = bisect.bisect_right(self._starts, k) - 1
        return self.plans[plan], k - self._starts[plan]
