"""The rows of each sample: one row, or as many as fit (`--use-packed-sequence`).

    epoch 0: rows in an order of its own    epoch 1: another order    ...
    3 0 4 1 2                               1 4 0 2 3
    |___| |_| |______________________________| ...        samples: rows whose text and images fit

Sample k depends on k, the seed and the rows before it alone: it does not depend on how many samples are read.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowOrder:
    """The numbers of the rows of samples.

    Attributes:
        ends: number of rows before the end of each sample; None: a sample is one row.
    """

    num_rows: int
    seed: int
    ends: Integers | None = None

    def rows(self, k: int) -> list[int]:
        """Return the rows of sample k."""
        if self.ends is None:
            return [self._row(k)]
        start = int(self.ends[k - 1]) if k else 0
        return [self._row(place) for place in range(start, int(self.ends[k]))]

    def _row(self, place: int) -> int:
        epoch, number = divmod(place, self.num_rows)
        return int(order_of_epoch(self.num_rows, self.seed, epoch)[number])


@functools.lru_cache(maxsize=8)
def order_of_epoch(num_rows: int, seed: int, epoch: int) -> Integers:
    """Return the order of the rows in an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


def packed_order(
    lengths: Integers, sizes: tuple[int, int], *, seed: int, num_samples: int | None
) -> RowOrder:
    """Pack rows into samples in their order: a row that does not fit begins the next sample.

    Args:
        lengths: tokens of the text and images of each row, [rows, 2], at most `sizes`.
        sizes: of a sample.
        num_samples: None: those of one epoch.
    """
    ends: list[int] = []
    text = images = place = 0
    for place, (more_text, more_images) in enumerate(_in_order(lengths, seed, num_samples)):
        text, images = text + more_text, images + more_images
        if text > sizes[0] or images > sizes[1]:
            ends.append(place)
            text, images = more_text, more_images
            if len(ends) == num_samples:
                break
    else:
        ends.append(place + 1)
    return RowOrder(len(lengths), seed, np.array(ends, np.int64))


def _in_order(lengths: Integers, seed: int, num_samples: int | None) -> Iterator[list[int]]:
    """Yield the lengths of rows, epoch by epoch, until the samples are full."""
    epoch = 0
    while num_samples is not None or epoch == 0:
        yield from lengths[order_of_epoch(len(lengths), seed, epoch)].tolist()
        epoch += 1
