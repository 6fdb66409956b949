"""Mix several datasets into one, by weight or in proportion to their sizes.

    weights and prefixes -> samples needed of each dataset -> BlendIndex: the dataset and its sample at each position

The order is greedy: position i takes the next sample of the dataset with the largest deficit, weight * max(i, 1) -
samples taken so far. Each position depends on all before it, which would cost one Python step per position. Instead,
positions are cut into chunks that are computed in parallel from estimated counts; a chunk whose estimate was wrong is
computed again. In a block of positions, only datasets whose deficits are among the largest are compared.

Source: Megatron-LM, core/datasets/blended_dataset.py; rules in tests/golden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import ConfigError
from megatrain.data.samples.dataset import lengths_of_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatrain.data.samples.dataset import AnySample, SampleDataset, TokenSpan

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.integer[Any]]

SURPLUS: Final = 0.005
"""Share of extra samples that each dataset is built with, on top of those its weight needs."""
CELLS: Final = 1 << 16
"""Chunks times datasets that are computed in parallel: as many as fit in a core's cache."""
BLOCK: Final = 64
"""Positions for which the datasets that may be taken are selected once."""
MAX_DATASETS: Final = np.iinfo(np.int16).max + 1
"""`BlendIndex.dataset_index` has 16 bits."""
_COUNTED_ROWS: Final = 1 << 20
MIN_CHUNK: Final = 1024
"""Positions of the shortest chunk."""
BURN_IN: Final = 8
"""An estimate is improved by computing 1 / BURN_IN of a chunk before the chunk."""


def normalized(weights: Sequence[float] | Floats) -> Floats:
    """Divide weights by their sum."""
    shares = np.asarray(weights, np.float64)
    normal: Floats = shares / np.sum(shares)
    return normal


def blend_counts(shares: Floats, num_samples: int) -> list[int]:
    """Return how many of `num_samples` each dataset provides, each rounded up."""
    return [math.ceil(num_samples * share) for share in shares.tolist()]


def counts_with_surplus(counts: Sequence[int], surplus: float = SURPLUS) -> list[int]:
    """Return how many samples each dataset is built with."""
    return [math.ceil(count * (1 + surplus)) for count in counts]


@dataclass(frozen=True)
class BlendIndex:
    """The sample at each position of a blend."""

    dataset_index: npt.NDArray[np.int16]
    """Number of the dataset, [n]."""
    dataset_sample_index: npt.NDArray[np.int64]
    """Sample of that dataset, [n]."""
    known_counts: Integers | None = None
    """`counts`, if the index was cached with them."""

    def counts(self, num_datasets: int) -> Integers:
        """Return how many samples of each dataset are read, counted by blocks: `bincount` needs 8 bytes a sample."""
        found = np.zeros(num_datasets, np.int64)
        if self.known_counts is not None:
            found[: len(self.known_counts)] = self.known_counts
            return found
        for start in range(0, len(self.dataset_index), _COUNTED_ROWS):
            found += np.bincount(self.dataset_index[start : start + _COUNTED_ROWS], minlength=num_datasets)
        return found


def build_blend_index(weights: Sequence[float] | Floats, num_samples: int) -> BlendIndex:
    """Order `num_samples` samples by weight: always the dataset with the largest deficit, the first among equals.

    Raises:
        ConfigError: there are more datasets than the index can number.
    """
    return _ChunkedBlend(normalized(weights), num_samples, limits=None).build()


def build_exhaustive_blend_index(sizes: Sequence[int]) -> BlendIndex:
    """Order all samples of all datasets, in proportion to their sizes."""
    return _ChunkedBlend(normalized(sizes), sum(sizes), limits=np.asarray(sizes, np.float64)).build()


class _ChunkedBlend:
    """Computes a blend index in chunks of positions. Counts are floats, which represent them exactly."""

    def __init__(self, shares: Floats, num_samples: int, *, limits: Floats | None) -> None:
        self.shares = shares
        self.limits = limits
        self.num_samples = num_samples
        num_datasets = len(shares)
        if num_datasets > MAX_DATASETS:
            raise ConfigError(
                f"the blend has {num_datasets} datasets; the maximum is {MAX_DATASETS}",
                fix="merge datasets of equal weight",
            )
        min_chunk = max(MIN_CHUNK, 4 * num_datasets)
        compared = min(num_datasets, 4 * BLOCK)
        self.num_chunks = max(1, min(CELLS // compared, num_samples // min_chunk))
        self.length = -(-num_samples // self.num_chunks)

    def build(self) -> BlendIndex:
        first = np.arange(self.num_chunks) * self.length
        burn_in = self.length // BURN_IN
        counts = np.zeros((self.num_chunks, len(self.shares)))
        counts[1:] = self._estimated_counts(first[1:] - burn_in)
        self._run(first[1:] - burn_in, counts[1:], burn_in)
        ends = np.empty_like(counts)
        datasets = np.empty((self.num_chunks, self.length), np.int16)
        samples = np.empty((self.num_chunks, self.length), np.int64)
        wrong = np.arange(self.num_chunks)
        # The first wrong chunk starts at the end of a right one, so each round leaves fewer.
        while len(wrong):
            running = counts[wrong]
            datasets[wrong], samples[wrong] = self._run(first[wrong], running, self.length)
            ends[wrong] = running
            wrong = np.flatnonzero((counts[1:] != ends[:-1]).any(axis=1)) + 1
            counts[wrong] = ends[wrong - 1]
        return BlendIndex(datasets.reshape(-1)[: self.num_samples], samples.reshape(-1)[: self.num_samples])

    def _estimated_counts(self, positions: Integers) -> Floats:
        """Estimate the counts at these positions: shares rounded such that their sum is right, [chunks, datasets]."""
        exact = np.multiply.outer(positions, self.shares)
        counts = np.floor(exact)
        missing = positions - counts.sum(axis=1)
        ranks = np.argsort(np.argsort(counts - exact, axis=1, kind="stable"), axis=1, kind="stable")
        estimate: Floats = counts + (ranks < missing[:, None])
        return estimate

    def _run(self, positions: Integers, counts: Floats, steps: int) -> tuple[Integers, Integers]:
        """Advance each chunk by `steps` positions and update its counts; return datasets and samples, [chunks, steps]."""
        rows = np.arange(len(positions))
        datasets = np.empty((len(positions), steps), np.int16)
        samples = np.empty((len(positions), steps), np.int64)
        for first in range(0, steps, BLOCK):
            length = min(BLOCK, steps - first)
            compared = self._compared(positions + first, counts, length)
            shares, limits = self.shares[compared], None if self.limits is None else self.limits[compared]
            taken_before = np.take_along_axis(counts, compared, axis=1)
            deficit = np.empty_like(taken_before)
            for step in range(first, first + length):
                _deficits(positions + step, shares, taken_before, limits, deficit)
                best = deficit.argmax(axis=1)
                datasets[:, step] = compared[rows, best]
                samples[:, step] = taken_before[rows, best]
                taken_before[rows, best] += 1
            np.put_along_axis(counts, compared, taken_before, axis=1)
        return datasets, samples

    def _compared(self, positions: Integers, counts: Floats, length: int) -> Integers:
        """Return datasets in ascending order, [chunks, k]: all that may be taken in `length` positions.

        Of the `length` largest deficits, one is not taken before the last position, and a deficit grows until its dataset is taken:
        a dataset that would end below all of them is never the largest.
        """
        num_datasets = counts.shape[1]
        if num_datasets > 4 * BLOCK:
            last = np.empty_like(counts)
            _deficits(positions, self.shares, counts, self.limits, last)
            last.partition(num_datasets - length, axis=1)
            smallest = last[:, num_datasets - length].copy()
            _deficits(positions + length - 1, self.shares, counts, self.limits, last)
            most = int((last >= smallest[:, None]).sum(axis=1).max(initial=1))
            if most <= num_datasets // 2:
                found: Integers = np.argpartition(last, num_datasets - most, axis=1)[:, num_datasets - most :]
                return np.sort(found, axis=1)
        return np.broadcast_to(np.arange(num_datasets), counts.shape)


def _deficits(
    positions: Integers, shares: Floats, counts: Floats, limits: Floats | None, out: Floats
) -> None:
    """Fill `out` with the number of samples that each dataset lacks at each position, [chunks, datasets]; -inf: it has no more."""
    np.multiply(np.maximum(positions, 1).astype(np.float64)[:, None], shares, out=out)
    out -= counts
    if limits is not None:
        out[counts >= limits] = -np.inf


class BlendedDataset:
    """The samples of several datasets in the order of a blend index. Implements `MeasuredDataset`."""

    def __init__(
        self, datasets: Sequence[SampleDataset], index: BlendIndex, names: Sequence[str] = ()
    ) -> None:
        """Combine datasets.

        Args:
            datasets: the datasets, as numbered in the index.
            index: the sample at each position.
            names: names of the datasets, for messages.

        Raises:
            ConfigError: the index takes more samples of a dataset than it has.
        """
        self.datasets = tuple(datasets)
        self.index = index
        for number, (count, dataset) in enumerate(
            zip(index.counts(len(datasets)).tolist(), datasets, strict=True)
        ):
            if count > len(dataset):
                name = f" ({names[number]})" if names else ""
                raise ConfigError(
                    f"dataset {number} of the blend{name} has {len(dataset)} samples, but its weight needs {count}",
                    fix="use a larger --mid-level-dataset-surplus, or leave out the weights to read each dataset once",
                )

    def __len__(self) -> int:
        """Return the samples of the blend."""
        return len(self.index.dataset_index)

    def __getitem__(self, k: int) -> AnySample:
        """Return sample k of the blend."""
        dataset, sample = self._locate(k)
        return dataset[sample]

    def spans(self, k: int) -> list[TokenSpan]:
        dataset, sample = self._locate(k)
        return dataset.spans(sample)

    def lengths(self, numbers: Integers) -> Integers:
        own = self.index.dataset_sample_index[numbers]
        return lengths_of_parts(self.datasets, self.index.dataset_index[numbers], own)

    def _locate(self, k: int) -> tuple[SampleDataset, int]:
        """Return the dataset of sample k, and the sample's index in it."""
        if not 0 <= k < len(self):
            raise IndexError(f"sample {k} of {len(self)}")
        return self.datasets[int(self.index.dataset_index.take(k))], int(
            self.index.dataset_sample_index.take(k)
        )
