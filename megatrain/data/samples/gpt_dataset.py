"""Cut token sequences into samples for a GPT model.

    k -> stored token spans of sample k (gpt_index) -> tokens, and labels shifted by one
                                                    -> loss mask, position ids, document starts

Source: Megatron-LM, core/datasets/gpt_dataset.py; rules in tests/golden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatrain.data.samples.dataset import Sample, TokenSpan, check_ids
from megatrain.data.tokenizers.files import NO_PAD

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from megatrain.data.indexed.reader import SequenceSource
    from megatrain.data.samples.gpt_index import GPTIndex, Integers


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Options for cutting and masking samples, equal for all datasets of a run."""

    seq_length: int
    """s, tokens of a sample."""
    eod: int | None
    """End-of-document id; None: the tokenizer has none, and no option below needs it."""
    pad: int = NO_PAD
    """Padding id, see `effective_pad`; it is masked in the loss and replaced before it reaches the model."""
    vocab_size: int | None = None
    """Ids from here on are an error when they are read; None: not checked."""
    eod_mask_loss: bool = False
    """Mask the loss at end-of-document tokens."""
    reset_position_ids: bool = False
    """Restart positions after every end-of-document token."""
    reset_attention_mask: bool = False
    """Confine attention to documents; an end-of-document token belongs to the document before it."""
    inter_document_masking: bool = False
    """Confine attention and positions to stored sequences, independent of their tokens."""
    conversations: bool = False
    """Sequences are conversations, see `conversations.py`."""
    packs_documents: bool = False
    """Samples are whole sequences, see `document_dataset.py`."""
    mock_lengths: str | None = None
    """Lengths of mock documents, see `mock.mock_lengths`."""
    rewrite: Callable[[npt.NDArray[np.int64], int], npt.NDArray[np.int64]] | None = None
    """Changes the s + 1 ids of a sample, given with its number, before tokens and labels are cut from them."""


def document_starts(tokens: Integers, eod: int | None) -> npt.NDArray[np.int64]:
    """Return the offsets of documents in a sample: 0, and after every end-of-document token."""
    starts = np.flatnonzero(tokens[:-1] == eod) + 1
    return np.concatenate((np.zeros(1, np.int64), starts))


def effective_pad(pad: int, special_ids: Collection[int], *, allow_ambiguous: bool = False) -> int:
    """Return the id that counts as padding in the data: none if the tokenizer also uses its pad id for something else."""
    return NO_PAD if pad in special_ids and not allow_ambiguous else pad


def make_sample(
    tokens: npt.NDArray[np.int64],
    labels: npt.NDArray[np.int64],
    options: SampleOptions,
    stored_starts: npt.NDArray[np.int64],
) -> Sample:
    """Return the sample of these ids [s], with the masks and positions that the options ask for.

    Args:
        tokens: changed in place.
        stored_starts: offsets of stored sequences; the first is 0.
    """
    loss_mask = (labels != options.pad).astype(np.float32)
    if options.eod_mask_loss:
        loss_mask[tokens == options.eod] = 0.0
    position_ids = np.arange(options.seq_length, dtype=np.int64)
    attention_starts = np.zeros(1, np.int64)
    if options.inter_document_masking:
        attention_starts = stored_starts
    elif options.reset_attention_mask:
        attention_starts = document_starts(tokens, options.eod)
    if options.inter_document_masking or options.reset_position_ids:
        starts = stored_starts if options.inter_document_masking else document_starts(tokens, options.eod)
        position_ids -= np.repeat(starts, np.diff(starts, append=options.seq_length))
    tokens[tokens == options.pad] = 0  # the pad id may lie outside the vocabulary; its loss is masked
    labels = np.where(labels == options.pad, 0, labels)
    return Sample(tokens, labels, loss_mask, position_ids, attention_starts)


class GPTDataset:
    """The samples of one split of one dataset. Stateless: sample k is the same whenever and wherever it is read."""

    def __init__(self, source: SequenceSource, index: GPTIndex, options: SampleOptions) -> None:
        """Combine sequences with a sample index that was built for the same `seq_length`."""
        self.source = source
        self.index = index
        self.options = options

    def __len__(self) -> int:
        """Return the samples of all epochs."""
        return len(self.index)

    def __getitem__(self, k: int) -> Sample:
        """Return sample k of the shuffled order."""
        text, span_starts = self._read_tokens(self._unshuffled(k))
        if self.options.rewrite is not None:
            text = self.options.rewrite(text, k)
        return make_sample(text[:-1].copy(), text[1:], self.options, span_starts)

    def spans(self, k: int) -> list[TokenSpan]:
        """See `SampleDataset`. Empty spans are left out."""
        spans = []
        for sequence, offset, length in self._spans(self._unshuffled(k)):
            count = int(self.source.lengths[sequence]) - offset if length is None else length
            if count:
                document = self.source.document_of(sequence)
                spans.append(TokenSpan(self.source.name, document, sequence, offset, count))
        return spans

    def _unshuffled(self, k: int) -> int:
        """Return the index of sample k before shuffling."""
        if not 0 <= k < len(self):
            raise IndexError(f"sample {k} of {len(self)}")
        return int(self.index.shuffle_index.take(k))

    def _read_tokens(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the s + 1 tokens of unshuffled sample `number`, and the offsets of its spans.

        A span that contains only the last label has no offset.
        """
        text = np.empty(self.options.seq_length + 1, np.int64)
        starts, spans = [], list(self._spans(number))
        filled = 0
        for sequence, offset, length in spans:
            span = self.source.read(sequence, offset, length)
            text[filled : filled + len(span)] = span
            starts.append(filled)
            filled += len(span)
        assert filled == len(text), "the index holds whole samples only"
        size = self.options.vocab_size
        if size is not None and not 0 <= text.min() <= text.max() < size:
            for part, (sequence, offset, _) in zip(np.split(text, starts[1:]), spans, strict=True):
                check_ids(self.source, sequence, offset, part, size)
        return text, np.array([start for start in starts if start < self.options.seq_length], np.int64)

    def _spans(self, number: int) -> Iterator[tuple[int, int, int | None]]:
        """Yield (sequence, offset, length) of each stored span of a sample; length None: to the end of the sequence."""
        # `take` reads mapped arrays without Python's lock.
        (first, offset), (last, last_offset) = self.index.sample_index.take(
            (number, number + 1), axis=0
        ).tolist()
        sequences: list[int] = self.index.document_index.take(range(first, last + 1)).tolist()
        for sequence in sequences[:-1]:
            yield sequence, offset, None
            offset = 0
        yield sequences[-1], offset, last_offset + 1 - offset
