"""Cuts token sequences into samples for a GPT model.

    sequences x epochs -> shuffled (document_index) -> laid end to end -> cut every s tokens (sample_index)
                                                                       -> handed out shuffled (shuffle_index)

A sample is s + 1 tokens: s inputs and, shifted by one, s labels; neighbours share a token. A sample depends on its
number alone, so that resuming needs one integer. "Document" in `document_index` is Megatron-LM's word: what is
shuffled are stored sequences.

Source: Megatron-LM, core/datasets/gpt_dataset.py; rules in tests/golden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from megatrain.data.indexed import Elements, SequenceSource

Integers = npt.NDArray[np.integer[Any]]

NO_PAD: Final = -1
"""The pad id of data without padding: no stored token is ever equal to it."""
SEPARATE_BELOW: Final = 0.80
"""A final epoch of which a smaller share is needed is shuffled apart from the epochs before it."""
CUT_ROWS: Final = 1 << 20
"""Borders computed at once: bounds the scratch memory of building an index."""


@dataclass(frozen=True)
class GptIndex:
    """The order of a split's samples, for all its epochs."""

    document_index: Integers
    """Sequence numbers in the order they are laid end to end, [num_epochs * sequences]."""
    sample_index: Integers
    """Border j: (position in `document_index`, offset in that sequence), [samples + 1, 2]."""
    shuffle_index: Integers
    """Sample k that is handed out is the stretch from border `shuffle_index[k]` on, [samples]."""
    num_epochs: int
    separate_final_epoch: bool

    def __len__(self) -> int:
        """Samples of all epochs: as many or more than were asked for."""
        return len(self.shuffle_index)


@dataclass(frozen=True)
class Sample:
    """One sample of s tokens."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.float32]
    """1 where the label counts."""
    position_ids: npt.NDArray[np.int64]


def build_index(
    lengths: Integers,
    sequence_range: range,
    *,
    seq_length: int,
    seed: int,
    num_samples: int | None,
    add_extra_token: bool = True,
    drop_last_partial: bool = True,
) -> GptIndex:
    """Order the samples of one split.

    Args:
        lengths: tokens of every sequence of the dataset, [n].
        sequence_range: the sequences of this split, ascending.
        seq_length: s, tokens of a sample.
        seed: of the split's own generator; all shuffles draw from it in turn.
        num_samples: how many are wanted, met by whole epochs; None: one epoch.
        add_extra_token: a sample reads s + 1 tokens, so that its last token has a label.
        drop_last_partial: leave out the tokens after the last whole sample; else they are one more, padded.
    """
    assert seq_length > 0, "checked with the configuration"
    epoch_tokens = int(lengths[sequence_range.start : sequence_range.stop].sum(dtype=np.int64))
    if not epoch_tokens:
        raise ConfigError(
            f"sequences {sequence_range.start} to {sequence_range.stop} (excluded) hold no token to cut samples from",
            fix="choose a --split that gives them a sequence with tokens, or use other data",
        )
    extra = int(add_extra_token)
    num_epochs = 1 if num_samples is None else max(1, -(-(num_samples * seq_length + extra) // epoch_tokens))
    before = ((num_epochs - 1) * epoch_tokens - extra) // seq_length  # samples of all epochs but the last
    is_separate = False
    if num_epochs > 1 and num_samples is not None:
        per_epoch = (epoch_tokens - extra) // seq_length
        is_separate = num_samples - before < int(SEPARATE_BELOW * per_epoch)

    # The generator's legacy shuffle is what the order is defined by: other generators give other orders.
    random = np.random.RandomState(seed)
    id_type = np.dtype(np.int32 if sequence_range.stop <= np.iinfo(np.int32).max else np.int64)
    epoch: Integers = np.arange(sequence_range.start, sequence_range.stop).astype(id_type)
    document_index = np.tile(epoch, num_epochs)
    for part in _parts(document_index, (num_epochs - 1) * len(sequence_range), is_separate):
        random.shuffle(part)
    sample_index = cut_samples(
        lengths,
        document_index,
        seq_length,
        add_extra_token=add_extra_token,
        drop_last_partial=drop_last_partial,
    )
    count = len(sample_index) - 1
    number_type = np.dtype(np.uint32 if count < np.iinfo(np.uint32).max - 1 else np.int64)
    shuffle_index: Integers = np.arange(count).astype(number_type)
    for part in _parts(shuffle_index, before, is_separate):
        random.shuffle(part)
    return GptIndex(document_index, sample_index, shuffle_index, num_epochs, is_separate)


def _parts(order: Integers, border: int, is_separate: bool) -> tuple[Integers, ...]:
    """What is shuffled together, in turn."""
    return (order[:border], order[border:]) if is_separate else (order,)


def cut_samples(
    lengths: Integers,
    document_index: Integers,
    seq_length: int,
    *,
    add_extra_token: bool = True,
    drop_last_partial: bool = True,
) -> Integers:
    """The borders between samples as (position in `document_index`, offset in that sequence), [samples + 1, 2].

    Border j lies at token j * s of the laid-out sequences. With the extra token, it names the sequence which holds
    that token; without, the first which ends there or later, so that an offset may equal a sequence's length.
    """
    extra = int(add_extra_token)
    ends = np.cumsum(lengths[document_index], dtype=np.int64)
    usable = int(ends[-1]) - extra
    count = usable // seq_length
    if not drop_last_partial:
        # Megatron-LM divides in single precision here, and a drop-in has its number of validation samples.
        count = int(np.ceil(np.float32(usable) / np.float32(seq_length)))
    narrow = np.iinfo(np.int32).max
    sample_index = np.empty((count + 1, 2), np.int32 if len(document_index) <= narrow else np.int64)
    for start in range(0, count + 1, CUT_ROWS):
        stop = min(start + CUT_ROWS, count + 1)
        borders = np.minimum(np.arange(start, stop, dtype=np.int64) * seq_length, usable)
        positions = np.searchsorted(ends, borders, side="right" if add_extra_token else "left")
        sample_index[start:stop, 0] = positions
        sample_index[start:stop, 1] = borders - (ends[positions] - lengths[document_index[positions]])
    sample_index[0] = 0
    if count * seq_length > usable:  # the partial one ends where the text does
        sample_index[-1] = len(document_index) - 1, lengths[document_index[-1]] - extra
    return sample_index


def attention_block_starts(tokens: Integers, eod: int) -> npt.NDArray[np.int64]:
    """Where the documents of a sample begin: at 0 and behind every end-of-document token, which is of the older one."""
    starts = np.flatnonzero(tokens[:-1] == eod) + 1
    return np.concatenate((np.zeros(1, np.int64), starts))


def effective_pad(pad: int, special_ids: Collection[int], *, allow_ambiguous: bool = False) -> int:
    """The id that counts as padding in the data: none if the tokenizer uses its pad id for something else too."""
    return NO_PAD if pad in special_ids and not allow_ambiguous else pad


class GptSamples:
    """The samples of one split, by number. Stateless: item k is the same whenever and wherever it is read."""

    def __init__(
        self,
        source: SequenceSource,
        index: GptIndex,
        *,
        seq_length: int,
        eod: int,
        pad: int = NO_PAD,
        vocab_size: int | None = None,
        add_extra_token: bool = True,
        eod_mask_loss: bool = False,
        reset_position_ids: bool = False,
    ) -> None:
        """Join sequences with the order of their samples.

        Args:
            source: the sequences.
            index: made by `build_index` with the same `seq_length` and `add_extra_token`.
            seq_length: s, tokens of a sample.
            add_extra_token: a sample reads s + 1 tokens.
            eod: end-of-document id.
            pad: id that neither counts in the loss nor reaches the model, see `effective_pad`.
            vocab_size: ids from here on are an error when they are read; None: not checked.
            eod_mask_loss: no loss for what is predicted from an end-of-document token.
            reset_position_ids: count positions anew behind every end-of-document token.
        """
        self.source = source
        self.index = index
        self.seq_length = seq_length
        self._eod = eod
        self._pad = pad
        self._vocab_size = vocab_size
        self._extra = int(add_extra_token)
        self._eod_mask_loss = eod_mask_loss
        self._reset_position_ids = reset_position_ids

    def __len__(self) -> int:
        """Samples of all epochs."""
        return len(self.index)

    def __getitem__(self, k: int) -> Sample:
        """Sample k in shuffled order."""
        if not 0 <= k < len(self):
            raise IndexError(f"sample {k} of {len(self)}")
        text = self._stretch(int(self.index.shuffle_index[k]))
        tokens = text[: self.seq_length].copy()
        labels = text[1:] if self._extra else np.append(text[1:], self._pad)
        loss_mask = (labels != self._pad).astype(np.float32)
        if self._eod_mask_loss:
            loss_mask[tokens == self._eod] = 0.0
        position_ids = np.arange(self.seq_length, dtype=np.int64)
        if self._reset_position_ids:
            starts = attention_block_starts(tokens, self._eod)
            position_ids -= np.repeat(starts, np.diff(starts, append=self.seq_length))
        tokens[tokens == self._pad] = 0  # a pad may lie outside the vocabulary; its loss is masked
        labels = np.where(labels == self._pad, 0, labels)
        return Sample(tokens, labels, loss_mask, position_ids)

    def _stretch(self, number: int) -> npt.NDArray[np.int64]:
        """The tokens of sample `number` before shuffling, padded on the right to s, or s + 1 with the extra token."""
        stretch = np.full(self.seq_length + self._extra, self._pad, np.int64)
        filled = 0
        for sequence, offset, length in self._pieces(number):
            piece = self.source.read(sequence, offset, length)
            if self._vocab_size is not None:
                self._check_ids(piece, sequence, offset, self._vocab_size)
            stretch[filled : filled + len(piece)] = piece
            filled += len(piece)
        return stretch

    def _pieces(self, number: int) -> Iterator[tuple[int, int, int | None]]:
        """(sequence, offset, length) of the stored pieces that make up a sample; a length of None: to the end."""
        first, offset = map(int, self.index.sample_index[number])
        last, last_offset = map(int, self.index.sample_index[number + 1])
        for position in range(first, last + 1):
            length = last_offset + self._extra - offset if position == last else None
            yield int(self.index.document_index[position]), offset, length
            offset = 0

    def _check_ids(self, piece: Elements, sequence: int, offset: int, vocab_size: int) -> None:
        wrong = (piece < 0) | (piece >= vocab_size)
        if wrong.any():
            place = int(np.argmax(wrong))
            raise InputError(
                f"{self.source.name}: document {self.source.document_of(sequence)} (sequence {sequence}, token "
                f"{offset + place}) holds id {piece[place]}, outside the vocabulary of {vocab_size}",
                fix="use the tokenizer that the data was made with, or the right --vocab-size",
            )
