"""Rewrite samples for fill in the middle (https://arxiv.org/abs/2207.14255): each document of a sample, with a probability.

    text -> prefix, middle, suffix, cut at two random characters -> each tokenized
         -> <fim_prefix> prefix <fim_suffix> suffix <fim_middle> middle, or <fim_prefix> <fim_suffix> suffix <fim_middle> prefix middle

Source: Megatron-LM, training/datasets/fim_dataset.py, whose random numbers depend on the order in which a worker reads samples. Here those of a
sample depend on its number and the seed, so that a resumed run reads the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import ConfigError
from megatrain.data.tokenizers.build import Tokenizer
from megatrain.data.tokenizers.huggingface import LibraryTokenizer

if TYPE_CHECKING:
    from megatrain.config.schema.data import DataConfig

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class FillInMiddle:
    """Rewrites the s + 1 ids of a sample, to as many."""

    tokenizer: Tokenizer
    seed: int
    eod: int | None
    """Id that ends documents."""
    prefix: int
    middle: int
    suffix: int
    pad: int
    """Id that fills a sample that has become shorter."""
    split: int | None = None
    """Id at which documents are cut into pieces that are rewritten by themselves; None: they are not cut."""
    rate: float
    """Probability that a document is rewritten."""
    fragment_rate: float
    """Probability that a piece of a document is rewritten."""
    spm_rate: float
    """Probability of the suffix first, if it is."""
    no_prefix: str | None = None
    """Texts that start with this are left as they are."""

    def __call__(self, ids: Ids, number: int) -> Ids:
        """Return the rewritten ids of sample `number`."""
        return self.rewritten(ids, np.random.RandomState([self.seed % (1 << 32), number]))

    def rewritten(self, ids: Ids, draws: np.random.RandomState) -> Ids:
        """Return the ids with random numbers from `draws`, cut or filled up to their length."""
        found = [*self._documents(ids, draws)]
        out = np.full(len(ids), self.pad, np.int64)
        out[: len(found)] = found[: len(ids)]
        return out

    def _documents(self, ids: Ids, draws: np.random.RandomState) -> Iterator[int]:
        """Yield the documents of a sample; an empty one is left out with its end."""
        start = 0
        for end in np.flatnonzero(ids == self.eod):
            if end > start:
                yield from self._document(ids[start:end], draws)
                yield int(ids[end])
            start = end + 1
        yield from self._document(ids[start:], draws)

    def _document(self, ids: Ids, draws: np.random.RandomState) -> Iterator[int]:
        cuts = np.flatnonzero(ids == self.split)
        if not len(cuts):
            yield from self._rearranged(ids, self.rate, draws)
        elif not draws.binomial(1, self.rate):
            yield from map(int, ids)
        else:
            start = 0
            for end in cuts:
                if end > start:
                    yield from self._rearranged(ids[start:end], self.fragment_rate, draws)
                    yield int(ids[end])
                start = end + 1
            yield from self._rearranged(ids[start:], self.fragment_rate, draws)

    def _rearranged(self, ids: Ids, rate: float, draws: np.random.RandomState) -> list[int]:
        """Return a text with its middle last, or as it is."""
        if not draws.binomial(1, rate):
            return ids.tolist()
        left_out = {*self.tokenizer.special_ids, self.prefix, self.middle, self.suffix, self.pad}
        text = self.tokenizer.decode([number for number in ids.tolist() if number not in left_out])
        if self.no_prefix is not None and text.startswith(self.no_prefix):
            return ids.tolist()
        first, last = sorted(draws.randint(0, len(text) + 1, size=2))
        prefix, middle, suffix = map(self.tokenizer.encode, (text[:first], text[first:last], text[last:]))
        if draws.binomial(1, self.spm_rate):
            return [self.prefix, self.suffix, *suffix, self.middle, *prefix, *middle]
        return [self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle]


def fill_in_middle(data: DataConfig, tokenizer: Tokenizer, seed: int) -> FillInMiddle:
    """Return what --fim-data asks for.

    Raises:
        ConfigError: the tokenizer has no such token, or puts tokens around each text.
    """
    if tokenizer.encode(""):
        raise ConfigError(
            "the tokenizer puts tokens around each text, and --fim-data would have them inside of documents",
            fix="add --tokenizer-hf-no-include-special-tokens",
        )

    def token(flag: str, text: str) -> int:
        named = tokenizer.ids.get(text) if isinstance(tokenizer, LibraryTokenizer) else None
        ids = tokenizer.encode(text) if named is None else [named]
        if len(ids) != 1:
            raise ConfigError(
                f"{flag} {text} is {len(ids)} tokens of the tokenizer, and --fim-data needs it as one",
                fix=f"name a token of the vocabulary with {flag}, or add it with --tokenizer-special-tokens",
            )
        return ids[0]

    return FillInMiddle(
        tokenizer=tokenizer,
        seed=seed,
        eod=tokenizer.eod if data.fim_eod_token is None else token("--fim-eod-token", data.fim_eod_token),
        prefix=token("--fim-prefix-token", data.fim_prefix_token),
        middle=token("--fim-middle-token", data.fim_middle_token),
        suffix=token("--fim-suffix-token", data.fim_suffix_token),
        pad=token("--fim-pad-token", data.fim_pad_token),
        split=None if data.fim_split_sample is None else token("--fim-split-sample", data.fim_split_sample),
        rate=data.fim_rate,
        fragment_rate=data.fim_rate if data.fim_fragment_rate is None else data.fim_fragment_rate,
        spm_rate=data.fim_spm_rate,
        no_prefix=data.fim_no_prefix,
    )
