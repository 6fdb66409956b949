"""Samples of BERT and T5: sentences of a document, with words masked or spans replaced.

    k -> sentences of sample k (sentence_index) -> cut to the target -> BERT: [CLS] A [SEP] B [SEP], words masked
                                                                     -> T5: spans replaced by sentinels, spans as labels

Sample k has a generator of its own, seeded with seed + k, so that it is the same whenever and wherever it is read. Arrays have
Megatron-LM's names.

Source: Megatron-LM, core/datasets/bert_dataset.py and t5_dataset.py.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import numpy.typing as npt

from megatrain.config.derive.families import BERT_SPECIAL_TOKENS
from megatrain.config.errors import InputError
from megatrain.data.indexed.reader import taken
from megatrain.data.samples.dataset import FamilySample, TokenSpan
from megatrain.data.samples.index_cache import NO_CACHE
from megatrain.data.samples.masking import MaskOptions, masked_runs
from megatrain.data.samples.sentence_index import SentenceOrder, build_sentence_index

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatrain.data.indexed.reader import IndexedDataset
    from megatrain.data.samples.index_cache import IndexCache
    from megatrain.data.samples.sentence_index import SentenceIndex
    from megatrain.data.tokenizers.mask_tokens import MaskVocabulary

Ids = npt.NDArray[np.int64]

BERT_WORDS: Final = MaskOptions(probability=0.15, max_words=3, is_geometric=False)
T5_WORDS: Final = MaskOptions(probability=0.15, max_words=10, is_geometric=True)
NOT_MASKED: Final = -1
"""Label of a token without loss."""
FIRST_SAMPLES: Final = 4
"""Samples that are read when a dataset is built, so that a decoder that holds no spans is found before the first step."""


@dataclass(frozen=True, kw_only=True)
class MaskedSamples:
    """The kind of the samples of BERT or T5, equal for all datasets of a run."""

    family: Literal["bert", "t5"]
    seq_length: int
    """Tokens of a sample of BERT, or of T5's encoder."""
    decoder_seq_length: int = 0
    """Tokens of T5's decoder."""
    has_order_head: bool = True
    """BERT learns the order of two texts."""
    short_probability: float = 0.1
    words: MaskOptions
    """How words are masked."""
    vocabulary: MaskVocabulary

    @property
    def max_tokens(self) -> int:
        """Return the longest target of a sample, without the special tokens."""
        return self.seq_length - (BERT_SPECIAL_TOKENS if self.family == "bert" else 2)

    @property
    def min_sentences(self) -> int:
        """Return the sentences of a sample, at least."""
        return 2 if self.family == "bert" and self.has_order_head else 1


def array_shapes(
    family: str,
    seq_length: int,
    decoder_seq_length: int | None = None,
    image_shape: tuple[int, ...] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array of a sample of a family, GPT included."""
    if family in ("gpt", "vlm"):
        text: dict[str, tuple[int, ...]]
        text = dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"), (seq_length,))
        return text if image_shape is None else {**text, "images": image_shape}
    if family == "bert":
        of_tokens = ("text", "types", "labels", "loss_mask", "padding_mask")
        return dict.fromkeys(of_tokens, (seq_length,)) | {"is_random": (), "truncated": ()}
    assert decoder_seq_length is not None, "a rule asks for it"
    encoder = dict.fromkeys(("text_enc", "enc_mask"), (seq_length,))
    decoder = dict.fromkeys(("text_dec", "labels", "loss_mask", "dec_mask"), (decoder_seq_length,))
    return encoder | decoder | {"truncated": ()}


def build_masked_dataset(
    source: IndexedDataset,
    part: range,
    options: MaskedSamples,
    *,
    seed: int,
    num_samples: int | None,
    cache: IndexCache = NO_CACHE,
) -> MaskedDataset:
    """Build the samples of the documents in `part`; the arguments are those of `build_sentence_index`.

    Raises:
        ConfigError: no document gives a sample.
        InputError: the first samples are not valid.
    """
    order = SentenceOrder(
        max_tokens=options.max_tokens,
        min_sentences=options.min_sentences,
        short_probability=options.short_probability,
        seed=seed,
    )
    boundaries = source.document_boundaries
    index = build_sentence_index(
        source.lengths, boundaries, part, order, num_samples=num_samples, cache=cache
    )
    dataset = MaskedDataset(source, index, options, seed)
    for k in range(min(len(dataset), FIRST_SAMPLES)):
        dataset[k]
    return dataset


class MaskedDataset:
    """The samples of one split of one dataset of sentences. Stateless."""

    def __init__(
        self, source: IndexedDataset, index: SentenceIndex, options: MaskedSamples, seed: int
    ) -> None:
        """Combine sentences with an index that was built for the same options and seed."""
        self.source = source
        self.index = index
        self.options = options
        self.seed = seed
        self._of_thread = threading.local()

    def __len__(self) -> int:
        """Return the samples of all epochs."""
        return len(self.index)

    def __getitem__(self, k: int) -> FamilySample:
        """Return sample k. Raises InputError if an id is outside the vocabulary, or spans do not fit the decoder."""
        first, end, target = self._row(k)
        ids = self.source.read_several(range(first, end)).astype(np.int64)
        self._check_ids(ids, first)
        random = self._generator((self.seed + k) % 2**32)
        if self.options.family == "bert":
            return _bert_sample(
                ids, taken(self.source.lengths, range(first, end)), target, self.options, random
            )
        return self._t5_sample(k, ids, target, random)

    def spans(self, k: int) -> list[TokenSpan]:
        """Return the sentences of sample k, whole: see `SampleDataset`."""
        first, end, _ = self._row(k)
        document = self.source.document_of(first)
        return [
            TokenSpan(self.source.name, document, sentence, 0, int(self.source.lengths[sentence]))
            for sentence in range(first, end)
        ]

    def _generator(self, seed: int) -> np.random.RandomState:
        """Return this thread's generator, seeded; a new one would take longer than the sample."""
        found: np.random.RandomState | None = getattr(self._of_thread, "random", None)
        if found is None:
            found = self._of_thread.random = np.random.RandomState()
        found.seed(seed)
        return found

    def _row(self, k: int) -> list[int]:
        """Return first sentence, end and target of sample k."""
        if not 0 <= k < len(self):
            raise IndexError(f"sample {k} of {len(self)}")
        row: list[int] = self.index.samples.take((k,), axis=0)[0].tolist()
        return row

    def _t5_sample(self, k: int, ids: Ids, target: int, random: np.random.RandomState) -> FamilySample:
        options, vocabulary = self.options, self.options.vocabulary
        text = ids[:target]
        runs = sorted(
            masked_runs(text, target, vocabulary, options.words, random), key=lambda run: int(run[0])
        )
        if len(runs) > len(vocabulary.sentinels):
            raise InputError(
                f"{self.source.name}: sample {k} has {len(runs)} spans, but there are {len(vocabulary.sentinels)} sentinels",
                fix="use a smaller --mask-prob or --encoder-seq-length",
            )
        encoder: list[int] = []
        spans: list[int] = []
        position = 0
        for run, sentinel in zip(runs, vocabulary.sentinels, strict=False):
            encoder += [*text[position : run[0]].tolist(), sentinel]
            spans += [sentinel, *text[run].tolist()]
            position = int(run[-1]) + 1
        encoder += text[position:].tolist()
        length, decoder_length = len(spans) + 1, options.decoder_seq_length
        if length > decoder_length:
            raise InputError(
                f"{self.source.name}: the spans of sample {k} and its end token are {length} tokens, more than"
                f" --decoder-seq-length {decoder_length}",
                fix=f"use --decoder-seq-length {1 + 2 * int(options.words.probability * options.max_tokens)} or more, which"
                " holds the spans of any sample, or a smaller --mask-prob",
            )
        mask = _padded(np.ones(length), decoder_length)
        arrays = {
            "text_enc": _padded(encoder, options.seq_length),
            "text_dec": _padded([vocabulary.cls, *spans], decoder_length),
            "labels": _padded([*spans, vocabulary.sep], decoder_length, NOT_MASKED),
            "loss_mask": mask,
            "truncated": np.array(int(len(ids) > target)),
            "enc_mask": _padded(np.ones(len(encoder)), options.seq_length),
            "dec_mask": mask.copy(),
        }
        return FamilySample(arrays)

    def _check_ids(self, ids: Ids, first: int) -> None:
        """Raise InputError unless the tokens of sentences from `first` on are in the vocabulary."""
        size = self.options.vocabulary.size
        if len(ids) and not 0 <= ids.min() <= ids.max() < size:
            raise InputError(
                f"{self.source.name}: document {self.source.document_of(first)} (from sequence {first} on) has ids from"
                f" {ids.min()} to {ids.max()}, outside the vocabulary of {size}",
                fix="use the tokenizer that the data was made with",
            )


def _bert_sample(
    ids: Ids,
    lengths: npt.NDArray[np.int32],
    target: int,
    options: MaskedSamples,
    random: np.random.RandomState,
) -> FamilySample:
    """Return [CLS] A [SEP] B [SEP], or [CLS] A [SEP] without the order head, masked.

    Args:
        ids: tokens of the sentences, concatenated.
        lengths: tokens of each sentence.
    """
    vocabulary = options.vocabulary
    parts, is_swapped = [ids], False
    if options.has_order_head:
        cut = random.randint(1, len(lengths)) if len(lengths) >= 3 else 1
        parts = np.split(ids, [int(lengths[:cut].sum())])
        is_swapped = random.random_sample() < 0.5
        parts = parts[::-1] if is_swapped else parts
    excess = len(ids) - target
    parts = _cut(parts, excess, random)
    first = len(parts[0]) + 2
    kept = [parts[0], *filter(len, parts[1:])]  # an empty second text has no [SEP]
    text = np.concatenate([[vocabulary.cls], *(np.append(part, vocabulary.sep) for part in kept)])
    types = np.zeros(len(text), np.int64)
    types[first:] = 1
    masked, labels = text.copy(), np.full(len(text), NOT_MASKED, np.int64)
    for run in masked_runs(text, target, vocabulary, options.words, random):
        labels[run] = text[run]
        for position in run.tolist():
            if random.random_sample() < 0.8:
                masked[position] = vocabulary.mask
            elif random.random_sample() >= 0.5:
                masked[position] = random.randint(0, vocabulary.size)
    length = options.seq_length
    arrays = {
        "text": _padded(masked, length),
        "types": _padded(types, length),
        "labels": _padded(labels, length, NOT_MASKED),
        "is_random": np.array(int(is_swapped)),
        "loss_mask": _padded(labels != NOT_MASKED, length),
        "padding_mask": _padded(masked != 0, length),
        "truncated": np.array(int(excess > 0)),
    }
    return FamilySample(arrays)


def _cut(parts: list[Ids], excess: int, random: np.random.RandomState) -> list[Ids]:
    """Take `excess` tokens away, one by one: the first or the last of the longer text, of the second if both are equal."""
    if excess <= 0:
        return parts
    bounds = [[0, len(part)] for part in parts]
    for is_first in (random.random_sample(excess) < 0.5).tolist():
        longer = max(reversed(bounds), key=lambda bound: bound[1] - bound[0])
        if is_first:
            longer[0] += 1
        else:
            longer[1] -= 1
    return [part[start:end] for part, (start, end) in zip(parts, bounds, strict=True)]


def _padded(values: Sequence[int] | npt.NDArray[np.generic], length: int, padding: int = 0) -> Ids:
    """Return values as int64, filled up to a length."""
    result = np.full(length, padding, np.int64)
    result[: len(values)] = values
    return result
