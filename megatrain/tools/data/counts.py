"""Statistics of a dataset: sequences, documents, their lengths, and token ids.

Memory is bounded for datasets of any size: files are read in blocks, and quantiles come from histograms.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megatrain.data.indexed.reader import IndexedDataset

ROWS: Final = 1 << 20
"""Sequences or documents per block."""
BLOCK_BYTES: Final = 1 << 24
BINS: Final = 1 << 16
PROGRESS_SECONDS: Final = 5.0

Integers = npt.NDArray[np.integer[Any]]
Blocks = Callable[[], Iterator[Integers]]
"""Returns the numbers block by block, from the beginning at each call."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Statistics of sequence or document lengths, in tokens. A quantile is the smallest length that reaches it."""

    min: int
    median: int
    mean: float
    p95: int
    max: int


def contents(dataset: IndexedDataset, eod: int | None) -> dict[str, Any]:
    """Return all counts by name, as in the JSON output. `eod`: the end-of-document id, if known."""
    lengths = {
        "sequence_lengths": _sequence_lengths(dataset),
        "document_lengths": _document_lengths(dataset),
        "sequences_per_document": _sequences_per_document(dataset),
    }
    return {
        "prefix": dataset.prefix,
        "element_type": dataset.dtype.name,
        "bytes": {
            "bin": dataset.num_tokens * dataset.dtype.itemsize,
            "idx": dataset.index_path.stat().st_size,
        },
        "documents": dataset.num_documents,
        "documents_without_sequences": _count_zeros(_sequences_per_document(dataset)),
        "sequences": len(dataset),
        "empty_sequences": _count_zeros(_sequence_lengths(dataset)),
        "tokens": dataset.num_tokens,
        "modes": _modes(dataset),
        **{name: _asdict(summary(blocks)) for name, blocks in lengths.items()},
        "idx_crc32": zlib.crc32(np.memmap(dataset.index_path, np.uint8, "r").data),
        "eod": eod,
        **count_ids(dataset, eod),
    }


def count_ids(dataset: IndexedDataset, eod: int | None) -> dict[str, int | None]:
    """Read all tokens; return what their ids are like, by name. All None: there are no tokens, or elements are not integers."""
    if dataset.dtype.kind not in "iu" or not dataset.num_tokens:
        return dict.fromkeys(("smallest_id", "largest_id", "eod_count", "bin_crc32"))
    smallest, largest, eods, done, crc32 = [], [], 0, 0, 0
    logged_at = time.monotonic()
    for block in dataset.blocks(BLOCK_BYTES):
        smallest.append(int(block.min()))
        largest.append(int(block.max()))
        eods += int(np.count_nonzero(block == eod)) if eod is not None else 0
        crc32 = zlib.crc32(block.data, crc32)
        done += len(block)
        if time.monotonic() - logged_at >= PROGRESS_SECONDS:
            logged_at = time.monotonic()
            print(f"{done / dataset.num_tokens:.0%} of {dataset.num_tokens:,} tokens read", file=sys.stderr)
    eod_count = eods if eod is not None else None
    return {
        "smallest_id": min(smallest),
        "largest_id": max(largest),
        "eod_count": eod_count,
        "bin_crc32": crc32,
    }


def summary(blocks: Blocks) -> Lengths | None:
    """Return the statistics of lengths; None if there are none."""
    extremes = [
        (len(block), int(block.min()), int(block.max()), int(block.sum(dtype=np.int64))) for block in blocks()
    ]
    if not extremes:
        return None
    counts, lows, highs, sums = zip(*extremes, strict=True)
    count, low, high = sum(counts), min(lows), max(highs)

    def quantile(share: float) -> int:
        return _ranked(blocks, max(0, math.ceil(share * count) - 1), low, high)

    return Lengths(min=low, median=quantile(0.5), mean=sum(sums) / count, p95=quantile(0.95), max=high)


def _ranked(blocks: Blocks, rank: int, low: int, high: int) -> int:
    """Return the value of index `rank` in sorted order, by histograms of successively narrower ranges."""
    while low < high:
        width = (high - low) // BINS + 1
        counts = np.zeros(BINS, np.int64)
        for block in blocks():
            inside = block[(block >= low) & (block <= high)].astype(np.int64)
            counts += np.bincount((inside - low) // width, minlength=BINS)
        ends = np.cumsum(counts)
        bin_ = int(np.searchsorted(ends, rank, side="right"))
        rank -= int(ends[bin_] - counts[bin_])
        low, high = low + bin_ * width, min(high, low + (bin_ + 1) * width - 1)
    return low


def _sequence_lengths(dataset: IndexedDataset) -> Blocks:
    return lambda: (dataset.lengths[start : start + ROWS] for start in range(0, len(dataset), ROWS))


def _boundary_blocks(dataset: IndexedDataset) -> Iterator[Integers]:
    """Yield document boundaries in blocks; adjacent blocks share one boundary."""
    for start in range(0, dataset.num_documents, ROWS):
        yield dataset.document_boundaries[start : start + ROWS + 1]


def _sequences_per_document(dataset: IndexedDataset) -> Blocks:
    return lambda: (np.diff(boundaries) for boundaries in _boundary_blocks(dataset))


def _document_lengths(dataset: IndexedDataset) -> Blocks:
    def first_tokens(boundaries: Integers) -> Integers:
        starts = np.full(len(boundaries), dataset.num_tokens, np.int64)
        inside = boundaries < len(dataset)
        starts[inside] = dataset.offsets[boundaries[inside]] // dataset.dtype.itemsize
        return starts

    return lambda: (np.diff(first_tokens(boundaries)) for boundaries in _boundary_blocks(dataset))


def _count_zeros(blocks: Blocks) -> int:
    return sum(int(np.count_nonzero(block == 0)) for block in blocks())


def _modes(dataset: IndexedDataset) -> dict[str, int] | None:
    """Return the number of sequences of each mode; None without modes."""
    if dataset.modes is None:
        return None
    counts = np.bincount(dataset.modes.view(np.uint8), minlength=256)
    return {str(np.uint8(mode).view(np.int8)): int(counts[mode]) for mode in np.flatnonzero(counts)}


def _asdict(lengths: Lengths | None) -> dict[str, Any] | None:
    return None if lengths is None else dataclasses.asdict(lengths)
