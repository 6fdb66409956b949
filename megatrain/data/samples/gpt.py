"""Cuts token sequences into samples for a GPT model.

    k -> the stored pieces that sample k is made of (gpt_index) -> tokens, and shifted by one their labels
                                                                -> loss mask, positions, where documents start

Source: Megatron-LM, core/datasets/gpt_dataset.py; rules in tests/golden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import InputError
from megatrain.data.samples.dataset import Piece, Sample

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from megatrain.data.indexed.reader import Elements, SequenceSource
    from megatrain.data.samples.gpt_index import GptIndex, Integers

NO_PAD: Final = -1
"""The pad id of data without padding: no stored token is ever equal to it."""


@dataclass(frozen=True, kw_only=True)
class SampleRules:
    """How text becomes samples, alike for all datasets of a run."""

    seq_length: int
    """s, tokens of a sample."""
    eod: int | None
    """End-of-document id; None: the tokenizer has none, and nothing below asks for it."""
    pad: int = NO_PAD
    """Id that neither counts in the loss nor reaches the model, see `effective_pad`."""
    vocab_size: int | None = None
    """Ids from here on are an error when they are read; None: not checked."""
    add_extra_token: bool = True
    """A sample reads s + 1 tokens, so that its last one has a label."""
    eod_mask_loss: bool = False
    """No loss for what is predicted from an end-of-document token."""
    reset_position_ids: bool = False
    """Count positions anew behind every end-of-document token."""
    reset_attention_mask: bool = False
    """Attention stays between end-of-document tokens; the token itself belongs to the older side."""
    inter_document_masking: bool = False
    """Attention and positions stay inside of stored sequences, whatever tokens they hold."""


def attention_block_starts(tokens: Integers, eod: int | None) -> npt.NDArray[np.int64]:
    """Where the documents of a sample begin: at 0 and behind every end-of-document token, which is of the older one."""
    starts = np.flatnonzero(tokens[:-1] == eod) + 1
    return np.concatenate((np.zeros(1, np.int64), starts))


def effective_pad(pad: int, special_ids: Collection[int], *, allow_ambiguous: bool = False) -> int:
    """The id that counts as padding in the data: none if the tokenizer uses its pad id for something else too."""
    return NO_PAD if pad in special_ids and not allow_ambiguous else pad


class GptSamples:
    """The samples of one split, by number. Stateless: item k is the same whenever and wherever it is read."""

    def __init__(self, source: SequenceSource, index: GptIndex, rules: SampleRules) -> None:
        """Join sequences with the order of their samples, made for the same `seq_length` and `add_extra_token`."""
        self.source = source
        self.index = index
        self.rules = rules
        self._extra = int(rules.add_extra_token)

    def __len__(self) -> int:
        """Samples of all epochs."""
        return len(self.index)

    def __getitem__(self, k: int) -> Sample:
        """Sample k in shuffled order."""
        rules = self.rules
        text, piece_starts = self._stretch(self._unshuffled(k))
        tokens = text[: rules.seq_length].copy()
        labels = text[1:] if self._extra else np.append(text[1:], rules.pad)
        loss_mask = (labels != rules.pad).astype(np.float32)
        if rules.eod_mask_loss:
            loss_mask[tokens == rules.eod] = 0.0
        position_ids = np.arange(rules.seq_length, dtype=np.int64)
        document_starts = np.zeros(1, np.int64)
        if rules.inter_document_masking:
            document_starts = piece_starts
        elif rules.reset_attention_mask:
            document_starts = attention_block_starts(tokens, rules.eod)
        if rules.inter_document_masking or rules.reset_position_ids:
            starts = (
                piece_starts if rules.inter_document_masking else attention_block_starts(tokens, rules.eod)
            )
            position_ids -= np.repeat(starts, np.diff(starts, append=rules.seq_length))
        tokens[tokens == rules.pad] = 0  # a pad may lie outside the vocabulary; its loss is masked
        labels = np.where(labels == rules.pad, 0, labels)
        return Sample(tokens, labels, loss_mask, position_ids, document_starts)

    def origin(self, k: int) -> list[Piece]:
        """See `Samples`. Pieces without a token are left out."""
        pieces = []
        for sequence, offset, length in self._pieces(self._unshuffled(k)):
            count = int(self.source.lengths[sequence]) - offset if length is None else length
            if count:
                document = self.source.document_of(sequence)
                pieces.append(Piece(self.source.name, document, sequence, offset, count))
        return pieces

    def _unshuffled(self, k: int) -> int:
        """The number of sample k before shuffling."""
        if not 0 <= k < len(self):
            raise IndexError(f"sample {k} of {len(self)}")
        return int(self.index.shuffle_index[k])

    def _stretch(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The tokens of sample `number` before shuffling, padded on the right to s, or s + 1 with the extra token.

        Also where its stored pieces start; one that holds the extra token alone is none.
        """
        stretch = np.full(self.rules.seq_length + self._extra, self.rules.pad, np.int64)
        starts = []
        filled = 0
        for sequence, offset, length in self._pieces(number):
            piece = self.source.read(sequence, offset, length)
            if self.rules.vocab_size is not None:
                self._check_ids(piece, sequence, offset, self.rules.vocab_size)
            stretch[filled : filled + len(piece)] = piece
            if filled < self.rules.seq_length:
                starts.append(filled)
            filled += len(piece)
        return stretch, np.array(starts, np.int64)

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
