"""Mixes several datasets into one, by weights or in proportion to their sizes.

    words "0.3 a 0.7 b" -> Blend -> samples wanted of each dataset -> draw: which dataset is next, which sample of it

The draw is greedy: position i takes the dataset that lags most behind its share, w * max(i, 1) - times taken, and its
next sample. Each position depends on all before it, which would cost a step of Python each; so the positions are cut
into chunks that are drawn side by side from guessed counts, and a chunk whose guess was wrong is drawn again.

Source: Megatron-LM, core/datasets/blended_dataset.py; rules in tests/golden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatrain.data.samples.dataset import Piece, Sample, Samples

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.integer[Any]]

SURPLUS: Final = 0.005
"""Share of samples by which each dataset is built longer than its weight asks for."""
CELLS: Final = 1 << 16
"""Chunks times datasets that are drawn side by side: as many as stay in a core's cache."""
MOST_DATASETS: Final = np.iinfo(np.int16).max + 1
"""A draw numbers them in 16 bits."""
SHORTEST_CHUNK: Final = 1024
BURN_IN: Final = 8
"""A chunk's guess is improved by drawing this fraction of a chunk ahead of it."""


def normalized(weights: Sequence[float] | Floats) -> Floats:
    """Weights over their sum."""
    shares = np.asarray(weights, np.float64)
    normal: Floats = shares / np.sum(shares)
    return normal


def blend_counts(shares: Floats, num_samples: int) -> list[int]:
    """How many of `num_samples` each dataset gives, each rounded up."""
    return [math.ceil(num_samples * share) for share in shares.tolist()]


def longer_counts(counts: Sequence[int], surplus: float = SURPLUS) -> list[int]:
    """How many samples each dataset is built for."""
    return [math.ceil(count * (1 + surplus)) for count in counts]


@dataclass(frozen=True)
class Draw:
    """What a blend reads at each position."""

    dataset: npt.NDArray[np.int16]
    """Number of the dataset, [n]."""
    sample: npt.NDArray[np.int64]
    """Number of the sample in that dataset, [n]."""

    def counts(self, num_datasets: int) -> Integers:
        """How many samples of each dataset are read."""
        return np.bincount(self.dataset, minlength=num_datasets)


def draw_weighted(weights: Sequence[float] | Floats, num_samples: int) -> Draw:
    """`num_samples` draws by weight, each from the dataset that lags most; the first among equals.

    Raises:
        ConfigError: there are more datasets than a draw can number.
    """
    shares = normalized(weights)
    return _Chunks(shares, num_samples, limits=None).draw()


def draw_exhaustive(sizes: Sequence[int]) -> Draw:
    """All samples of all datasets, in proportion to their sizes."""
    return _Chunks(normalized(sizes), sum(sizes), limits=np.asarray(sizes, np.float64)).draw()


class _Chunks:
    """A draw, cut into chunks of positions. `counts` are kept as floats, which hold them exactly."""

    def __init__(self, shares: Floats, num_samples: int, *, limits: Floats | None) -> None:
        self.shares = shares
        self.limits = limits
        self.num_samples = num_samples
        num_datasets = len(shares)
        if num_datasets > MOST_DATASETS:
            raise ConfigError(
                f"the blend has {num_datasets} datasets, and can have {MOST_DATASETS}",
                fix="merge datasets of equal weight",
            )
        shortest = max(SHORTEST_CHUNK, 4 * num_datasets)
        self.num_chunks = max(1, min(CELLS // num_datasets, num_samples // shortest))
        self.length = -(-num_samples // self.num_chunks)

    def draw(self) -> Draw:
        first = np.arange(self.num_chunks) * self.length
        burn_in = self.length // BURN_IN
        counts = np.zeros((self.num_chunks, len(self.shares)))
        counts[1:] = self._guessed(first[1:] - burn_in)
        self._run(first[1:] - burn_in, counts[1:], burn_in)
        ends = np.empty_like(counts)
        datasets = np.empty((self.num_chunks, self.length), np.int16)
        samples = np.empty((self.num_chunks, self.length), np.int64)
        wrong = np.arange(self.num_chunks)
        while len(wrong):  # the first wrong chunk starts where a right one ends, so each round leaves fewer
            running = counts[wrong]
            datasets[wrong], samples[wrong] = self._run(first[wrong], running, self.length)
            ends[wrong] = running
            wrong = np.flatnonzero((counts[1:] != ends[:-1]).any(axis=1)) + 1
            counts[wrong] = ends[wrong - 1]
        return Draw(datasets.reshape(-1)[: self.num_samples], samples.reshape(-1)[: self.num_samples])

    def _guessed(self, positions: Integers) -> Floats:
        """Counts after so many draws, about: shares rounded such that their sum is right, [chunks, datasets]."""
        exact = np.multiply.outer(positions, self.shares)
        counts = np.floor(exact)
        missing = positions - counts.sum(axis=1)
        ranks = np.argsort(np.argsort(counts - exact, axis=1, kind="stable"), axis=1, kind="stable")
        guess: Floats = counts + (ranks < missing[:, None])
        return guess

    def _run(self, positions: Integers, counts: Floats, steps: int) -> tuple[Integers, Integers]:
        """Draw `steps` times in each chunk and update its counts; datasets and samples, [chunks, steps]."""
        rows = np.arange(len(positions))
        lag = np.empty_like(counts)
        datasets = np.empty((len(positions), steps), np.int16)
        samples = np.empty((len(positions), steps), np.int64)
        for step in range(steps):
            # A plain product of a column and a row, which this function forms twice as fast as broadcasting does.
            np.einsum("i,j->ij", np.maximum(positions + step, 1).astype(np.float64), self.shares, out=lag)
            lag -= counts
            if self.limits is not None:
                lag[counts >= self.limits] = -np.inf
            taken = lag.argmax(axis=1)
            datasets[:, step] = taken
            samples[:, step] = counts[rows, taken]
            counts[rows, taken] += 1
        return datasets, samples


class BlendedSamples:
    """Samples of several datasets in the order of a draw."""

    def __init__(self, datasets: Sequence[Samples], draw: Draw, names: Sequence[str] = ()) -> None:
        """Join datasets with a draw from them.

        Args:
            datasets: what is read.
            draw: in which order.
            names: of the datasets, for messages.

        Raises:
            ConfigError: the draw takes more of a dataset than it has.
        """
        self.datasets = tuple(datasets)
        self.order = draw
        for number, (count, dataset) in enumerate(
            zip(draw.counts(len(datasets)).tolist(), datasets, strict=True)
        ):
            if count > len(dataset):
                named = f" ({names[number]})" if names else ""
                raise ConfigError(
                    f"dataset {number} of the blend{named} has {len(dataset)} samples, and its weight asks for {count}",
                    fix="use a larger --mid-level-dataset-surplus, or leave out weights to read each dataset once",
                )

    def __len__(self) -> int:
        """Samples of the blend."""
        return len(self.order.dataset)

    def __getitem__(self, k: int) -> Sample:
        """Sample k of the blend."""
        dataset, number = self._place(k)
        return dataset[number]

    def origin(self, k: int) -> list[Piece]:
        """See `Samples`."""
        dataset, number = self._place(k)
        return dataset.origin(number)

    def _place(self, k: int) -> tuple[Samples, int]:
        """The dataset that sample k is drawn from, and its number there."""
        if not 0 <= k < len(self):
            raise IndexError(f"sample {k} of {len(self)}")
        return self.datasets[int(self.order.dataset[k])], int(self.order.sample[k])
