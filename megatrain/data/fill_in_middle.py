"""Rewrite samples for fill in the middle (https://arxiv.org/abs/2207.14255): each document of a sample, with a probability.

    text -> prefix, middle, suffix, cut at two random characters -> each tokenized
         -> <fim_prefix> prefix <fim_suffix> suffix <fim_middle> middle, or <fim_prefix> <fim_suffix> suffix <fim_middle> prefix middle

Source: Megatron-LM, training/datasets/fim_dataset.py, whose random numbers depend on the order in which a worker reads samples. Here those of a
sample depend on its number and the seed, so that a resumed run reads the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import ConfigError
from megatrain.config.schema.data import DataConfig
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.tokenizers.build import Tokenizer, load_tokenizer
from megatrain.data.tokenizers.huggingface import LibraryTokenizer

Ids = npt.NDArray[np.int64]
_TOKENS: Final = ("prefix", "middle", "suffix", "pad")


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
    split: int | None
    """Id at which documents are cut into pieces that are rewritten by themselves; None: they are not cut."""
    data: DataConfig
    """Has the probabilities, and the beginning of texts that stay as they are."""

    def __call__(self, ids: Ids, number: int) -> Ids:
        """Return the rewritten ids of sample `number`."""
        return self.rewritten(ids, np.random.RandomState([self.seed % (1 << 32), number]))

    def rewritten(self, ids: Ids, draws: np.random.RandomState) -> Ids:
        """Return the ids with random numbers from `draws`, cut or filled up to their length."""
        found = _by_pieces(ids, self.eod, lambda document: self._document(document, draws))
        return np.array([*found, *[self.pad] * len(ids)][: len(ids)])

    def _document(self, ids: Ids, draws: np.random.RandomState) -> list[int]:
        if not (ids == self.split).any():
            return self._rearranged(ids, self.data.fim_rate, draws)
        if not draws.binomial(1, self.data.fim_rate):
            return list(map(int, ids))
        rate = self.data.fim_rate if self.data.fim_fragment_rate is None else self.data.fim_fragment_rate
        return _by_pieces(ids, self.split, lambda piece: self._rearranged(piece, rate, draws))

    def _rearranged(self, ids: Ids, rate: float, draws: np.random.RandomState) -> list[int]:
        """Return a text with its middle last, or as it is."""
        if not draws.binomial(1, rate):
            return list(map(int, ids))
        left_out = {*self.tokenizer.special_ids, self.prefix, self.middle, self.suffix, self.pad}
        text = self.tokenizer.decode([number for number in ids.tolist() if number not in left_out])
        if self.data.fim_no_prefix is not None and text.startswith(self.data.fim_no_prefix):
            return list(map(int, ids))
        first, last = sorted(draws.randint(0, len(text) + 1, size=2))
        prefix, middle, suffix = map(self.tokenizer.encode, (text[:first], text[first:last], text[last:]))
        if draws.binomial(1, self.data.fim_spm_rate):
            return [self.prefix, self.suffix, *suffix, self.middle, *prefix, *middle]
        return [self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle]


def _by_pieces(ids: Ids, end: int | None, rewrite: Callable[[Ids], list[int]]) -> list[int]:
    """Rewrite the pieces before each `end`, and the last one; an empty piece before an end is left out with it."""
    *pieces, last = np.split(ids, np.flatnonzero(ids == end) + 1)
    found = [[*rewrite(piece[:-1]), int(piece[-1])] for piece in pieces if len(piece) > 1]
    return [*itertools.chain(*found), *rewrite(last)]


def fill_in_middle(data: DataConfig, config: TokenizerConfig, seed: int) -> FillInMiddle:
    """Return what --fim-data asks for.

    Raises:
        ConfigError: the tokenizer has no such token, or puts tokens around each text.
    """
    tokenizer = load_tokenizer(config)
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
        **{name: token(f"--fim-{name}-token", getattr(data, f"fim_{name}_token")) for name in _TOKENS},
        split=None if data.fim_split_sample is None else token("--fim-split-sample", data.fim_split_sample),
        data=data,
    )
