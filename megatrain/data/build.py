"""From a data path and a split string to the samples of train, valid and test.

IndexedDataset(prefix), or MockSequences -> split_ranges -> for each split that is asked for:
                                            build_index -> GptSamples
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain.config.errors import InputError
from megatrain.data.gpt import GptSamples, build_index, effective_pad
from megatrain.data.indexed import IndexedDataset, SequenceSource
from megatrain.data.mock import MOCK_SPLIT, MockSequences
from megatrain.data.splits import SPLIT_NAMES, require_sequences, split_ranges

if TYPE_CHECKING:
    from collections.abc import Collection


@dataclass(frozen=True)
class Splits:
    """Samples by purpose. None: none were asked for, or the split string gives no share to it."""

    train: GptSamples | None
    valid: GptSamples | None
    test: GptSamples | None


def build_splits(
    data_path: str | None,
    *,
    split: str,
    seq_length: int,
    seed: int,
    requested: tuple[int | None, int | None, int | None],
    vocab_size: int,
    eod: int,
    pad: int = -1,
    special_ids: Collection[int] = (),
    allow_ambiguous_pad_tokens: bool = False,
    eod_mask_loss: bool = False,
    reset_position_ids: bool = False,
    mmap: bool = True,
) -> Splits:
    """The samples of the three splits.

    Args:
        data_path: prefix of the indexed files; None: mock data, which always split evenly.
        split: such as `969,30,1`.
        seq_length: tokens of a sample.
        seed: of every split's shuffles.
        requested: samples wanted of train, valid and test; None: one epoch; 0: no dataset.
        vocab_size: the tokenizer's own, before padding.
        eod: the tokenizer's end-of-document id.
        pad: its padding id, -1: none.
        special_ids: ids that it uses otherwise.
        allow_ambiguous_pad_tokens: let `pad` count as padding also if it is the end of document or special otherwise.
        eod_mask_loss: see `GptSamples`.
        reset_position_ids: see `GptSamples`.
        mmap: see `IndexedDataset`.

    Raises:
        ConfigError: samples are asked of a split without sequences.
        InputError: the files are missing, broken or hold no token ids.
    """
    source: SequenceSource
    if data_path is None:
        source, split = MockSequences(vocab_size=vocab_size, eod=eod), MOCK_SPLIT
    else:
        source = _token_ids(data_path, mmap=mmap)
    ranges = split_ranges(split, len(source.lengths))
    # As in Megatron-LM, `--split 100,0,0` means "do not evaluate", whatever --eval-iters asks for.
    is_asked = [
        wanted != 0 and (part is not None or name == "train")
        for name, part, wanted in zip(SPLIT_NAMES, ranges, requested, strict=True)
    ]
    require_sequences(split, len(source.lengths), ranges, is_asked, source=source.name)
    pad = effective_pad(pad, {eod, *special_ids}, allow_ambiguous=allow_ambiguous_pad_tokens)

    def samples(part: range | None, wanted: int | None) -> GptSamples | None:
        if wanted == 0 or not part:
            return None
        index = build_index(source.lengths, part, seq_length=seq_length, seed=seed, num_samples=wanted)
        return GptSamples(
            source,
            index,
            seq_length=seq_length,
            eod=eod,
            pad=pad,
            vocab_size=vocab_size,
            eod_mask_loss=eod_mask_loss,
            reset_position_ids=reset_position_ids,
        )

    train, valid, test = (samples(part, wanted) for part, wanted in zip(ranges, requested, strict=True))
    return Splits(train, valid, test)


def _token_ids(prefix: str, *, mmap: bool) -> IndexedDataset:
    dataset = IndexedDataset(prefix, mmap=mmap)
    if dataset.dtype.kind not in "iu":
        raise InputError(
            f"{dataset.name}: elements are {dataset.dtype.name}, and token ids are integers",
            fix="give the prefix of a tokenized text dataset",
        )
    return dataset
