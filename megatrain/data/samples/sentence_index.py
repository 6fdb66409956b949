"""Build the index of samples of sentences: the document and the sentences of sample k.

    documents x epochs -> each cut into runs of sentences that reach a target length -> shuffled

A dataset holds whole epochs. Targets are drawn from one generator, in the order of documents; with short sequences, one in
1 / p is shorter than the longest.

Source: Megatron-LM, core/datasets/helpers.cpp (build_mapping).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import ConfigError
from megatrain.data.samples.index_cache import NO_CACHE
from megatrain.data.samples.mersenne import shuffled_by_64, words_32

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatrain.data.samples.index_cache import IndexCache

Integers = npt.NDArray[np.integer[Any]]

LONG_SENTENCE: Final = 512
"""Documents of several sentences with a longer one are left out."""
BLOCK_SENTENCES: Final = 1 << 20
"""Sentences that are cut at once: bounds the scratch memory of building an index."""
_FORMAT: Final = 2
"""Version of the arrays of a cached index."""


@dataclass(frozen=True, kw_only=True)
class SentenceOrder:
    """How samples are drawn from a corpus."""

    max_tokens: int
    """Longest target of a sample, without special tokens."""
    min_sentences: int
    """Sentences of a sample: 2 for the task of sentence order."""
    short_probability: float
    """Probability of a target that is shorter than `max_tokens`."""
    seed: int


@dataclass(frozen=True)
class SentenceIndex:
    """The samples of a split, over all its epochs."""

    samples: Integers
    """First sentence, end of the sentences, and target length in tokens, of each sample in shuffled order: [samples, 3]."""
    num_epochs: int
    num_short: int
    """Documents that are left out: they have too few sentences."""
    num_long: int
    """Documents that are left out: one of several sentences is longer than LONG_SENTENCE."""

    def __len__(self) -> int:
        """Return the samples of all epochs: at least as many as were requested."""
        return len(self.samples)


def build_sentence_index(
    lengths: Integers,
    boundaries: Integers,
    part: range,
    order: SentenceOrder,
    *,
    num_samples: int | None,
    cache: IndexCache = NO_CACHE,
) -> SentenceIndex:
    """Build the index of one split.

    Args:
        lengths: tokens of every sentence of the dataset, [n].
        boundaries: first sentence of every document, and n, [documents + 1].
        part: the documents of this split, ascending.
        order: how samples are drawn.
        num_samples: requested samples, rounded up to whole epochs; None: one epoch.
        cache: reads the index if it is cached, and stores it if it is large.

    Raises:
        ConfigError: no document gives a sample.
    """

    def build() -> dict[str, Integers]:
        num_short, num_long = _left_out(lengths, boundaries, part, order.min_sentences)
        blocks = []
        count = num_epochs = 0
        targets = _targets(order)
        while num_epochs == 0 if num_samples is None else count < num_samples:
            of_epoch = list(_cut(lengths, boundaries, part, order.min_sentences, targets))
            if not sum(map(len, of_epoch)):
                raise _no_samples(boundaries, part, order.min_sentences, num_short)
            blocks += of_epoch
            count += sum(map(len, of_epoch))
            num_epochs += 1
        dtype = np.dtype(np.uint32 if len(lengths) <= np.iinfo(np.uint32).max else np.uint64)
        rows = np.concatenate(blocks).astype(dtype) if blocks else np.empty((0, 3), dtype)
        return {
            "samples": rows[shuffled_by_64(len(rows), order.seed + 1)],
            "counts": np.array([num_epochs, num_short, num_long]),
        }

    sentences = slice(*(int(boundaries[document]) for document in (part.start, part.stop)))
    key = {
        "lengths": lengths[sentences],
        "boundaries": boundaries[part.start : part.stop + 1],
        "documents": [part.start, part.stop],
        "samples": num_samples,
        "format": _FORMAT,
        **vars(order),
    }
    num_rows = max(num_samples or 0, sentences.stop - sentences.start)
    arrays = cache.arrays("sentences", num_rows, key, build)
    return SentenceIndex(arrays["samples"], *map(int, arrays["counts"]))


def _targets(order: SentenceOrder) -> Iterator[int]:
    """Return the target lengths in the order in which they are drawn, without end."""
    longest = order.max_tokens
    if not order.short_probability:
        return itertools.repeat(longest)
    ratio = int(1 / order.short_probability + 0.5)

    def blocks() -> Iterator[list[int]]:
        for words in words_32(order.seed):
            targets: list[int] = np.where(words % ratio, longest, 2 + words % (longest - 1)).tolist()
            yield targets

    return itertools.chain.from_iterable(blocks())


def _cut(
    lengths: Integers, boundaries: Integers, part: range, least: int, targets: Iterator[int]
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the rows of one epoch, [samples, 3], a block of documents at a time.

    A sample ends where it has its target and `least` sentences, if more than one sentence is left; the last one of a document
    takes the rest. A target is drawn when a document begins, and after each sample.
    """
    for documents in _blocks(boundaries, part):
        bounds = boundaries[documents.start : documents.stop + 1]
        start = int(bounds[0])
        sizes = lengths[start : int(bounds[-1])]
        totals: list[int] = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))).tolist()
        used = _is_used(sizes, bounds - start, least)
        rows: list[int] = []
        for first, end in zip(
            (bounds[:-1][used] - start).tolist(), (bounds[1:][used] - start).tolist(), strict=True
        ):
            target = next(targets)
            while first < end:
                close = bisect_left(totals, totals[first] + target, first + least, end)
                if close > end - 2:
                    close = end
                rows += (first, close, target)
                target = next(targets)
                first = close
        found = np.array(rows, np.int64).reshape(-1, 3)
        found[:, :2] += start
        yield found


def _blocks(boundaries: Integers, part: range) -> Iterator[range]:
    """Yield the documents of a split in blocks of about BLOCK_SENTENCES sentences."""
    start = part.start
    while start < part.stop:
        end = int(np.searchsorted(boundaries, int(boundaries[start]) + BLOCK_SENTENCES, side="right")) - 1
        end = min(max(end, start + 1), part.stop)
        yield range(start, end)
        start = end


def _is_used(sizes: Integers, bounds: Integers, least: int) -> npt.NDArray[np.bool_]:
    """Return which documents give samples: those with `least` sentences, and no long one among several."""
    counts = np.diff(bounds)
    long_before = np.concatenate(([0], np.cumsum(sizes > LONG_SENTENCE)))
    used: npt.NDArray[np.bool_] = (counts >= max(least, 1)) & (
        (counts == 1) | ~np.diff(long_before[bounds]).astype(bool)
    )
    return used


def _left_out(lengths: Integers, boundaries: Integers, part: range, least: int) -> tuple[int, int]:
    """Return how many documents have too few sentences, and how many others give no samples."""
    short = used = 0
    for documents in _blocks(boundaries, part):
        bounds = boundaries[documents.start : documents.stop + 1]
        sizes = lengths[int(bounds[0]) : int(bounds[-1])]
        used += int(np.count_nonzero(_is_used(sizes, bounds - bounds[0], least)))
        short += int(np.count_nonzero(np.diff(bounds) < least))
    return short, len(part) - short - used


def _no_samples(boundaries: Integers, part: range, least: int, short: int) -> ConfigError:
    problem = (
        f"documents {part.start} to {part.stop} (excluded) give no sample: of {len(part)}, {short} have fewer than {least}"
        f" sentence{'s' * (least > 1)}, {len(part) - short} have a sentence of more than {LONG_SENTENCE} tokens among several"
    )
    if least > 1 and short and np.diff(boundaries[part.start : part.stop + 1]).max() == 1:
        return ConfigError(
            f"{problem}: the data is not split into sentences",
            fix="make it again with preprocess_data.py --split-sentences and give the prefix that ends in _sentence, or add"
            " --bert-no-binary-head",
        )
    return ConfigError(problem, fix="use other data, or a larger share in --split")
