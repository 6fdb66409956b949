"""The order of a split's samples: which stretch of which sequences sample k is.

    sequences x epochs -> shuffled (document_index) -> laid end to end -> cut every s tokens (sample_index)
                                                                       -> handed out shuffled (shuffle_index)

A sample is s + 1 tokens: s inputs and, shifted by one, s labels; neighbours share a token. "Document" in
`document_index` is Megatron-LM's word: what is shuffled are stored sequences.

Source: Megatron-LM, core/datasets/gpt_dataset.py; rules in tests/golden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import ConfigError
from megatrain.data.samples.index_cache import digest

if TYPE_CHECKING:
    from megatrain.data.samples.index_cache import IndexCache

Integers = npt.NDArray[np.integer[Any]]

SEPARATE_BELOW: Final = 0.80
"""A final epoch of which a smaller share is needed is shuffled apart from the epochs before it."""
CUT_ROWS: Final = 1 << 20
"""Borders computed at once: bounds the scratch memory of building an index."""


@dataclass(frozen=True)
class Epochs:
    """How often a split is read to give the samples that are wanted."""

    count: int
    is_last_separate: bool
    samples_before_last: int

    @classmethod
    def of(cls, epoch_tokens: int, *, seq_length: int, num_samples: int | None, extra: int) -> Epochs:
        """Whole epochs of `epoch_tokens` tokens that hold `num_samples` samples; None: one."""
        if num_samples is None:
            return cls(1, is_last_separate=False, samples_before_last=0)
        count = max(1, -(-(num_samples * seq_length + extra) // epoch_tokens))
        before = ((count - 1) * epoch_tokens - extra) // seq_length
        per_epoch = (epoch_tokens - extra) // seq_length
        is_separate = count > 1 and num_samples - before < int(SEPARATE_BELOW * per_epoch)
        return cls(count, is_separate, before)


@dataclass(frozen=True)
class GptIndex:
    """The order of a split's samples, for all its epochs."""

    document_index: Integers
    """Sequence numbers in the order they are laid end to end, [num_epochs * sequences]."""
    sample_index: Integers
    """Border j: (position in `document_index`, offset in that sequence), [samples + 1, 2]."""
    shuffle_index: Integers
    """Sample k that is handed out is the stretch from border `shuffle_index[k]` on, [samples]."""
    epochs: Epochs

    def __len__(self) -> int:
        """Samples of all epochs: as many or more than were asked for."""
        return len(self.shuffle_index)


def build_index(
    lengths: Integers,
    sequence_range: range,
    *,
    seq_length: int,
    seed: int,
    num_samples: int | None,
    add_extra_token: bool = True,
    drop_last_partial: bool = True,
    cache: IndexCache | None = None,
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
        cache: where the answer may lie already, and is left if it took long.
    """
    assert seq_length > 0, "checked with the configuration"
    part = lengths[sequence_range.start : sequence_range.stop]
    epoch_tokens = int(part.sum(dtype=np.int64))
    if not epoch_tokens:
        raise ConfigError(
            f"sequences {sequence_range.start} to {sequence_range.stop} (excluded) hold no token to cut samples from",
            fix="choose a --split that gives them a sequence with tokens, or use other data",
        )
    epochs = Epochs.of(
        epoch_tokens, seq_length=seq_length, num_samples=num_samples, extra=int(add_extra_token)
    )

    def arrays() -> dict[str, Integers]:
        # The generator's legacy shuffle is what the order is defined by: other generators give other orders.
        random = np.random.RandomState(seed)
        document_index = _shuffled_documents(sequence_range, epochs, random)
        sample_index = cut_samples(
            lengths,
            document_index,
            seq_length,
            add_extra_token=add_extra_token,
            drop_last_partial=drop_last_partial,
        )
        return {
            "document_index": document_index,
            "sample_index": sample_index,
            "shuffle_index": _shuffled_samples(len(sample_index) - 1, epochs, random),
        }

    num_rows = epochs.count * (len(sequence_range) + epoch_tokens // seq_length)
    if cache is None or not cache.is_worth(num_rows):
        return GptIndex(**arrays(), epochs=epochs)
    key = {
        "lengths": digest(part),
        "sequences": [sequence_range.start, sequence_range.stop],
        "seq_length": seq_length,
        "seed": seed,
        "epochs": epochs.count,
        "is_last_separate": epochs.is_last_separate,
        "add_extra_token": add_extra_token,
        "drop_last_partial": drop_last_partial,
    }
    return GptIndex(**cache.find_or_make("gpt", key, arrays), epochs=epochs)


def _shuffled_documents(sequence_range: range, epochs: Epochs, random: np.random.RandomState) -> Integers:
    id_type = np.dtype(np.int32 if sequence_range.stop <= np.iinfo(np.int32).max else np.int64)
    epoch: Integers = np.arange(sequence_range.start, sequence_range.stop, dtype=id_type)
    order = np.tile(epoch, epochs.count)
    for part in _parts(order, (epochs.count - 1) * len(sequence_range), epochs):
        random.shuffle(part)
    return order


def _shuffled_samples(count: int, epochs: Epochs, random: np.random.RandomState) -> Integers:
    number_type = np.dtype(np.uint32 if count < np.iinfo(np.uint32).max - 1 else np.int64)
    order: Integers = np.arange(count, dtype=number_type)
    for part in _parts(order, epochs.samples_before_last, epochs):
        random.shuffle(part)
    return order


def _parts(order: Integers, border: int, epochs: Epochs) -> tuple[Integers, ...]:
    """What is shuffled together, in turn."""
    return (order[:border], order[border:]) if epochs.is_last_separate else (order,)


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
