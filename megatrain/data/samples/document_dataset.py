"""Samples that are whole documents (--pack-documents); their lengths follow from the index, without reading a token.

    document of 10 tokens, --seq-length 4      labels 1 2 3 4 | 5 6 7 8 | 9      three samples, each label once

A document of n tokens has n - 1 labels; one without labels is left out. All samples are shuffled in each epoch: sample k is a
function of k and the seed alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import ConfigError
from megatrain.data.images.packing import order_of_epoch
from megatrain.data.samples.dataset import Sample, TokenSpan, check_ids
from megatrain.data.samples.gpt_dataset import make_sample

if TYPE_CHECKING:
    from megatrain.data.indexed.reader import SequenceSource
    from megatrain.data.samples.gpt_dataset import SampleOptions
    from megatrain.data.samples.gpt_index import Integers


@dataclass(frozen=True)
class DocumentIndex:
    """The pieces of documents that are samples, in the order of the data."""

    sequences: Integers
    """Document of each piece, [pieces]."""
    offsets: Integers
    """First token of each piece in its document, [pieces]."""
    lengths: Integers
    """Labels of each piece, [pieces]."""
    seed: int
    num_epochs: int

    def __len__(self) -> int:
        """Return the samples of all epochs."""
        return len(self.lengths) * self.num_epochs

    def pieces(self, numbers: Integers) -> Integers:
        """Return the pieces of samples, [n]."""
        epochs, places = np.divmod(numbers, len(self.lengths))
        found = np.zeros(len(numbers), np.int64)
        for epoch in np.unique(epochs).tolist():
            is_own = epochs == epoch
            found[is_own] = order_of_epoch(len(self.lengths), self.seed, epoch)[places[is_own]]
        return found


def build_document_index(
    lengths: npt.NDArray[np.integer], part: range, *, seq_length: int, seed: int, num_samples: int | None
) -> DocumentIndex:
    """Build the index of one split.

    Args:
        lengths: tokens of every document of the dataset.
        part: the documents of this split.
        seq_length: most labels of a sample.
        num_samples: requested samples, rounded up to whole epochs; None: one epoch.
    """
    labels = np.maximum(lengths[part.start : part.stop].astype(np.int64) - 1, 0)
    counts = -(-labels // seq_length)
    total = int(counts.sum())
    if not total:
        raise ConfigError(
            f"no document of {part.start} to {part.stop} (excluded) has two tokens",
            fix="choose a --split that includes longer documents, or other data",
        )
    numbers = np.repeat(np.arange(len(labels)), counts)
    places = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = places * seq_length
    return DocumentIndex(
        sequences=part.start + numbers,
        offsets=offsets,
        lengths=np.minimum(labels[numbers] - offsets, seq_length),
        seed=seed,
        num_epochs=1 if num_samples is None else max(1, -(-num_samples // total)),
    )


class DocumentDataset:
    """Samples of different lengths. Stateless: sample k is the same whenever and wherever it is read. Implements `MeasuredDataset`."""

    def __init__(self, source: SequenceSource, index: DocumentIndex, options: SampleOptions) -> None:
        """Combine tokens with an index that was built for the same `seq_length`."""
        self.source, self.index, self.options = source, index, options

    def __len__(self) -> int:
        """Return the samples of all epochs."""
        return len(self.index)

    def __getitem__(self, k: int) -> Sample:
        """Return sample k, of as many tokens as it has labels."""
        span = self.spans(k)[0]
        ids = self.source.read(span.sequence, span.offset, span.length + 1).astype(np.int64)
        check_ids(self.source, span.sequence, span.offset, ids, self.options.vocab_size)
        options = replace(self.options, seq_length=span.length)
        return make_sample(ids[:-1].copy(), ids[1:], options, np.zeros(1, np.int64))

    def lengths(self, numbers: Integers) -> Integers:
        return self.index.lengths[self.index.pieces(numbers)]

    def spans(self, k: int) -> list[TokenSpan]:
        """See `SampleDataset`. The label of the last token is not counted."""
        if not 0 <= k < len(self):
            raise IndexError(f"sample {k} of {len(self)}")
        index, (piece,) = self.index, self.index.pieces(np.array([k])).tolist()
        sequence = int(index.sequences[piece])
        document = self.source.document_of(sequence)
        return [
            TokenSpan(
                self.source.name, document, sequence, int(index.offsets[piece]), int(index.lengths[piece])
            )
        ]
