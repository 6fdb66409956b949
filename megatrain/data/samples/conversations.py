"""Pack conversations into samples for supervised fine-tuning (--sft).

    conversations x epochs -> shuffled -> first fit into open samples -> samples of whole conversations, padded
    sample k -> tokens, labels, loss on tokens of the assistant, positions and attention within each conversation

A conversation of L tokens takes L - 1 positions: its last token is a label only. One that is longer than a sample is cut
at the end; one without a label of the assistant is left out. Both are counted. With --pack-documents each conversation is a
sample of its own, not padded: `pack_loader.py` packs those of a global batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import ConfigError
from megatrain.data.indexed.reader import taken
from megatrain.data.samples.dataset import Sample, TokenSpan, check_ids
from megatrain.data.samples.index_cache import NO_CACHE
from megatrain.data.samples.sources import content_digest

if TYPE_CHECKING:
    from megatrain.data.indexed.reader import IndexedDataset, SequenceSource
    from megatrain.data.samples.gpt_dataset import SampleOptions
    from megatrain.data.samples.gpt_index import Integers
    from megatrain.data.samples.index_cache import IndexCache

OPEN_SAMPLES: Final = 256
"""Samples that further conversations may still join; the oldest is completed first."""
_FORMAT: Final = 2
"""Version of the arrays of a cached index."""


@dataclass(frozen=True)
class ConversationIndex:
    """The conversations of each sample, over all epochs."""

    sequences: Integers
    """Conversations of sample 0, of sample 1, .., [conversations]."""
    starts: Integers
    """Position in `sequences` at which each sample starts, and their end, [samples + 1]."""
    num_epochs: int
    num_left_out: int
    """Conversations without a label of the assistant within a sample."""
    num_cut: int
    """Other conversations that are longer than a sample."""

    def __len__(self) -> int:
        """Return the samples of all epochs: at least as many as were requested."""
        return len(self.starts) - 1


def counted_labels(mask: IndexedDataset, part: range, seq_length: int) -> npt.NDArray[np.int64]:
    """Return the labels with loss of each conversation of `part` within its first s positions, [n]."""
    counts = (np.count_nonzero(mask.read(number)[1 : seq_length + 1]) for number in part)
    return np.fromiter(counts, np.int64, len(part))


def build_conversation_index(
    lengths: Integers,
    mask: IndexedDataset,
    part: range,
    *,
    seq_length: int,
    seed: int,
    num_samples: int | None,
    is_packed: bool = True,
    cache: IndexCache = NO_CACHE,
) -> ConversationIndex:
    """Build the index of one split.

    Args:
        lengths: tokens of every conversation of the dataset, [n].
        mask: loss mask of the dataset.
        part: the conversations of this split, ascending.
        seq_length: s, positions of a sample.
        seed: seed of the order of conversations; all epochs draw from it in turn.
        num_samples: requested samples, rounded up to whole epochs; None: one epoch.
        is_packed: several conversations may share a sample.
        cache: reads the index if it is cached, and stores it if it is large.
    """

    def build() -> dict[str, Integers]:
        used = part.start + np.flatnonzero(counted_labels(mask, part, seq_length))
        if not len(used):
            raise ConfigError(
                f"conversations {part.start} to {part.stop} (excluded) have no label of the assistant within --seq-length"
                f" {seq_length}",
                fix="choose a --split that includes some, a larger --seq-length, or other data",
            )
        sizes = lengths[used].astype(np.int64) - 1
        is_cut = sizes > seq_length
        sizes = np.minimum(sizes, seq_length)
        random = np.random.RandomState(seed)
        sequences: list[npt.NDArray[np.int64]] = []
        starts = [np.zeros(1, np.int64)]
        num_built = num_epochs = num_sequences = 0
        while not num_epochs or (num_samples is not None and num_built < num_samples):
            order = random.permutation(len(used))
            members = packed(sizes[order], seq_length) if is_packed else [[one] for one in range(len(used))]
            counts = np.array([len(one) for one in members], np.int64)
            sequences.append(used[order[np.concatenate(members)]])
            starts.append(num_sequences + np.cumsum(counts))
            num_sequences += len(used)
            num_built += len(members)
            num_epochs += 1
        return {
            "sequences": np.concatenate(sequences),
            "starts": np.concatenate(starts),
            "counts": np.array([num_epochs, len(part) - len(used), np.count_nonzero(is_cut)]),
        }

    key = {
        "lengths": lengths[part.start : part.stop],
        "mask": content_digest(mask),
        "sequences": [part.start, part.stop],
        "seq_length": seq_length,
        "seed": seed,
        "samples": num_samples,
        "open_samples": OPEN_SAMPLES if is_packed else 0,
        "format": _FORMAT,
    }
    arrays = cache.arrays("conversations", max(num_samples or 0, len(part)), key, build)
    return ConversationIndex(arrays["sequences"], arrays["starts"], *map(int, arrays["counts"]))


def packed(sizes: npt.NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Pack items into bins: each into the first open bin that holds it, or into a new one. Returns the items of each bin.

    At most OPEN_SAMPLES bins are open. Bins are returned in the order in which they were opened.
    """
    bins: list[list[int]] = []
    left = np.zeros(OPEN_SAMPLES, np.int64)
    """Positions that are left in each open bin; slot b % OPEN_SAMPLES is that of bin b."""
    for item, size in enumerate(sizes.tolist()):
        oldest = max(len(bins) - OPEN_SAMPLES, 0)
        slots = np.roll(left, -(oldest % OPEN_SAMPLES))[: len(bins) - oldest]
        fits = slots >= size
        if fits.any():
            number = oldest + int(np.argmax(fits))
        else:
            number = len(bins)
            bins.append([])
            left[number % OPEN_SAMPLES] = capacity
        bins[number].append(item)
        left[number % OPEN_SAMPLES] -= size
    return bins


class ConversationDataset:
    """Samples of packed conversations. Stateless: sample k is the same whenever and wherever it is read. Implements `MeasuredDataset`."""

    def __init__(
        self, source: SequenceSource, mask: IndexedDataset, index: ConversationIndex, options: SampleOptions
    ) -> None:
        """Combine tokens, their loss mask, and an index that was built for the same `seq_length`."""
        self.source = source
        self.mask = mask
        self.index = index
        self.options = options

    def __len__(self) -> int:
        """Return the samples of all epochs."""
        return len(self.index)

    def __getitem__(self, k: int) -> Sample:
        """Return sample k. Padding has id 0, no loss, and attends to itself only."""
        length = self.options.seq_length
        if self.options.packs_documents:
            length = sum(span.length for span in self.spans(k))
        tokens, labels = np.zeros(length, np.int64), np.zeros(length, np.int64)
        loss_mask = np.zeros(length, np.float32)
        starts, filled = [], 0
        for sequence in self._sequences(k):
            ids = self.source.read(sequence, 0, self._size(sequence) + 1)
            check_ids(self.source, sequence, 0, ids, self.options.vocab_size)
            end = filled + len(ids) - 1
            tokens[filled:end] = ids[:-1]
            labels[filled:end] = ids[1:]
            loss_mask[filled:end] = self.mask.read(sequence, 1, len(ids) - 1)
            starts.append(filled)
            filled = end
        if filled < length:
            starts.append(filled)
        offsets = np.array(starts, np.int64)
        positions = np.arange(length) - np.repeat(offsets, np.diff(offsets, append=length))
        return Sample(tokens, labels, loss_mask, positions, offsets)

    def spans(self, k: int) -> list[TokenSpan]:
        """See `SampleDataset`. The last token of a conversation, which is a label only, is not counted."""
        return [
            TokenSpan(self.source.name, self.source.document_of(sequence), sequence, 0, self._size(sequence))
            for sequence in self._sequences(k)
        ]

    def lengths(self, numbers: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
        firsts = self.index.starts[numbers]
        counts = self.index.starts[numbers + 1] - firsts
        sample = np.repeat(np.arange(len(numbers)), counts)
        places = np.arange(len(sample)) + (firsts - np.cumsum(counts) + counts)[sample]
        sizes = taken(self.source.lengths, self.index.sequences[places].tolist()).astype(np.int64) - 1
        found = np.zeros(len(numbers), np.int64)
        np.add.at(found, sample, np.minimum(sizes, self.options.seq_length))
        return found

    def _sequences(self, k: int) -> list[int]:
        if not 0 <= k < len(self):
            raise IndexError(f"sample {k} of {len(self)}")
        found: list[int] = self.index.sequences.take(
            range(*self.index.starts.take((k, k + 1)).tolist())
        ).tolist()
        return found

    def _size(self, sequence: int) -> int:
        """Return the positions of a conversation."""
        return min(int(taken(self.source.lengths, sequence)[0]) - 1, self.options.seq_length)
