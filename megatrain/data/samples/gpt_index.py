"""Build the document, sample and shuffle indices of a split: which token spans sample k consists of.

    sequences x epochs -> shuffled (document_index) -> concatenated -> cut every s tokens (sample_index)
                                                                    -> shuffled (shuffle_index)

A sample has s + 1 tokens: s inputs and, shifted by one, s labels; consecutive samples share a token. "Document" in
`document_index` is Megatron-LM's word: the shuffled items are stored sequences.

Source: Megatron-LM, core/datasets/gpt_dataset.py; rules in tests/golden.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import ConfigError
from megatrain.data.indexed.reader import IndexedDataset
from megatrain.data.samples.index_cache import NO_CACHE, digest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatrain.data.indexed.reader import SequenceSource
    from megatrain.data.samples.index_cache import IndexCache

Integers = npt.NDArray[np.integer[Any]]

SEPARATE_BELOW: Final = 0.80
"""If less than this share of the last epoch is needed, the last epoch is shuffled separately."""
BLOCK_SEQUENCES: Final = 1 << 20
"""Sequences that are cut at once: bounds the scratch memory of building an index."""


@dataclass(frozen=True)
class LengthFacts:
    """Facts about the sequence lengths of a split, which a large dataset has in its stamp."""

    num_tokens: int
    digest: str

    @classmethod
    def of(cls, source: SequenceSource, part: range) -> LengthFacts:
        """Return the facts about the sequences `part` of a dataset."""
        if isinstance(source, IndexedDataset):
            name = f"lengths {part.start} {part.stop}"
            return cls(*source.known(name, lambda: cls._computed(source.lengths, part)))
        return cls(*cls._computed(source.lengths, part))

    @staticmethod
    def _computed(lengths: Integers, part: range) -> tuple[int, str]:
        found = lengths[part.start : part.stop]
        return int(found.sum(dtype=np.int64)), digest(found)


@dataclass(frozen=True)
class Epochs:
    """The number of epochs over a split that give the requested samples."""

    count: int
    is_last_separate: bool
    samples_before_last: int

    @classmethod
    def of(cls, epoch_tokens: int, *, seq_length: int, num_samples: int | None) -> Epochs:
        """Compute how many epochs of `epoch_tokens` tokens hold `num_samples` samples; None: one epoch."""
        if num_samples is None:
            return cls(1, is_last_separate=False, samples_before_last=0)
        count = max(1, -(-(num_samples * seq_length + 1) // epoch_tokens))
        before = ((count - 1) * epoch_tokens - 1) // seq_length
        per_epoch = (epoch_tokens - 1) // seq_length
        is_separate = count > 1 and num_samples - before < int(SEPARATE_BELOW * per_epoch)
        return cls(count, is_separate, before)


@dataclass(frozen=True)
class GPTIndex:
    """The sample order of a split, over all its epochs."""

    document_index: Integers
    """Sequence numbers in shuffled order, [num_epochs * sequences]."""
    sample_index: Integers
    """Boundary j between samples: (position in `document_index`, offset in that sequence), [samples + 1, 2]."""
    shuffle_index: Integers
    """Sample k starts at boundary `shuffle_index[k]`, [samples]."""
    epochs: Epochs

    def __len__(self) -> int:
        """Return the samples of all epochs: at least as many as were requested."""
        return len(self.shuffle_index)

    @property
    def num_epochs(self) -> int:
        """Epochs over the split."""
        return self.epochs.count


def build_index(
    lengths: Integers,
    sequence_range: range,
    *,
    seq_length: int,
    seed: int,
    num_samples: int | None,
    cache: IndexCache = NO_CACHE,
    facts: LengthFacts | None = None,
) -> GPTIndex:
    """Build the index of one split.

    Args:
        lengths: tokens of every sequence of the dataset, [n].
        sequence_range: the sequences of this split, ascending.
        seq_length: s, tokens of a sample.
        seed: seed of the split's own generator; all shuffles draw from it in turn.
        num_samples: requested samples, rounded up to whole epochs; None: one epoch.
        cache: reads the index if it is cached, and stores it if it is large.
        facts: of these sequences, if they are known.
    """
    assert seq_length > 0, "checked with the configuration"
    split_lengths = lengths[sequence_range.start : sequence_range.stop]
    epoch_tokens = facts.num_tokens if facts is not None else int(split_lengths.sum(dtype=np.int64))
    if not epoch_tokens:
        raise ConfigError(
            f"sequences {sequence_range.start} to {sequence_range.stop} (excluded) contain no tokens",
            fix="choose a --split that includes a sequence with tokens, or use other data",
        )
    epochs = Epochs.of(epoch_tokens, seq_length=seq_length, num_samples=num_samples)

    def build() -> dict[str, Integers]:
        # The legacy generator defines Megatron-LM's order; other generators give other orders.
        random = np.random.RandomState(seed)
        document_index = _build_document_index(sequence_range, epochs, random)
        sample_index = build_sample_index(lengths, document_index, seq_length)
        return {
            "document_index": document_index,
            "sample_index": sample_index,
            "shuffle_index": _build_shuffle_index(len(sample_index) - 1, epochs, random),
        }

    key = {
        "lengths": facts.digest if facts is not None else split_lengths,
        "sequences": [sequence_range.start, sequence_range.stop],
        "seq_length": seq_length,
        "seed": seed,
        "epochs": epochs.count,
        "is_last_separate": epochs.is_last_separate,
        "add_extra_token": True,  # these two are constants by now; they keep the names of existing files
        "drop_last_partial": True,
    }
    num_rows = epochs.count * (len(sequence_range) + epoch_tokens // seq_length)
    return GPTIndex(**cache.arrays("gpt", num_rows, key, build), epochs=epochs)


def _build_document_index(sequence_range: range, epochs: Epochs, random: np.random.RandomState) -> Integers:
    dtype = np.dtype(np.int32 if sequence_range.stop <= np.iinfo(np.int32).max else np.int64)
    order: Integers = np.arange(sequence_range.start, sequence_range.stop, dtype=dtype)
    if epochs.count > 1:
        order = np.tile(order, epochs.count)
    for part in _shuffled_together(order, (epochs.count - 1) * len(sequence_range), epochs):
        random.shuffle(part)
    return order


def _build_shuffle_index(count: int, epochs: Epochs, random: np.random.RandomState) -> Integers:
    dtype = np.dtype(np.uint32 if count < np.iinfo(np.uint32).max - 1 else np.int64)
    order: Integers = np.arange(count, dtype=dtype)
    for part in _shuffled_together(order, epochs.samples_before_last, epochs):
        random.shuffle(part)
    return order


def _shuffled_together(order: Integers, last_epoch_start: int, epochs: Epochs) -> tuple[Integers, ...]:
    """Return the parts that are shuffled one after the other: the last epoch is a part of its own if it is separate."""
    return (order[:last_epoch_start], order[last_epoch_start:]) if epochs.is_last_separate else (order,)


def build_sample_index(lengths: Integers, document_index: Integers, seq_length: int) -> Integers:
    """Return sample boundaries as (position in `document_index`, offset in that sequence), [samples + 1, 2].

    Boundary j is at token j * s of the concatenated sequences and names the sequence that contains this token. Tokens
    after the last whole sample are dropped.
    """
    dtype = np.int32 if len(document_index) <= np.iinfo(np.int32).max else np.int64
    parts, position, num_tokens = [], 0, 0
    for block in _blocks_of_lengths(lengths, document_index):
        ends = np.cumsum(block, dtype=np.int64) + num_tokens
        boundaries = np.arange(-(-num_tokens // seq_length) * seq_length, ends[-1], seq_length)
        places = np.searchsorted(ends, boundaries, side="right")
        offsets = boundaries - (ends[places] - block[places])
        parts.append(np.stack((places + position, offsets), axis=1).astype(dtype))
        position, num_tokens = position + len(block), int(ends[-1])
    sample_index = np.concatenate(parts)
    sample_index[0] = 0  # as in Megatron-LM, also if the first sequences are empty
    return sample_index


def _blocks_of_lengths(lengths: Integers, document_index: Integers) -> Iterator[Integers]:
    """Yield the lengths of the sequences in their order, in blocks; all cores look them up, which takes the longest."""
    num_threads = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(num_threads) as threads:
        for start in range(0, len(document_index), num_threads * BLOCK_SEQUENCES):
            group = document_index[start : start + num_threads * BLOCK_SEQUENCES]
            blocks = [group[at : at + BLOCK_SEQUENCES] for at in range(0, len(group), BLOCK_SEQUENCES)]
            yield from threads.map(lengths.__getitem__, blocks)
