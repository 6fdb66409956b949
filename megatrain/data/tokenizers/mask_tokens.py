"""The tokens of a vocabulary that masked language models need: [CLS], [SEP], [MASK], parts of words, and the sentinels of T5."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import ConfigError, Problem
from megatrain.data.tokenizers.huggingface import LibraryTokenizer

if TYPE_CHECKING:
    from megatrain.data.tokenizers.build import Tokenizer

_ROLES: Final = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
_CONTINUATION: Final = "##"


@dataclass(frozen=True, kw_only=True)
class MaskVocabulary:
    """The tokens that masking needs to know."""

    size: int
    """Tokens of the vocabulary."""
    cls: int
    sep: int
    mask: int
    continues: npt.NDArray[np.bool_]
    """True for each id whose token continues a word, such as ##ing, [size]."""
    sentinels: tuple[int, ...] = ()
    """Ids that stand for the spans of T5, in order: <extra_id_0>, <extra_id_1>, .."""


def mask_vocabulary(tokenizer: Tokenizer, *, needs_sentinels: bool) -> MaskVocabulary:
    """Return what masking needs of a tokenizer.

    Args:
        tokenizer: as `load_tokenizer` returns it.
        needs_sentinels: spans are replaced, as for T5.

    Raises:
        ConfigError: the tokenizer has no such tokens.
    """
    problems = [*_problems(tokenizer, needs_sentinels=needs_sentinels)]
    if problems:
        raise ConfigError.of(problems)
    assert isinstance(tokenizer, LibraryTokenizer), "a problem otherwise"
    ids = tokenizer.ids
    continues = np.zeros(tokenizer.vocab_size, bool)
    continues[[number for token, number in ids.items() if token.startswith(_CONTINUATION)]] = True
    cls, sep, mask = (tokenizer.role_ids[role] for role in _ROLES)
    return MaskVocabulary(
        size=tokenizer.vocab_size,
        cls=cls,
        sep=sep,
        mask=mask,
        continues=continues,
        sentinels=_sentinels(tokenizer),
    )


def _problems(tokenizer: Tokenizer, *, needs_sentinels: bool) -> Iterator[Problem]:
    fix = (
        f"use --tokenizer-type BertWordPiece{'Case' if needs_sentinels else 'LowerCase'} with the --vocab-file that the data"
        " was made with"
    )
    roles = tokenizer.role_ids if isinstance(tokenizer, LibraryTokenizer) else {}
    missing = [token for role, token in _ROLES.items() if role not in roles]
    if missing:
        yield Problem(f"the tokenizer has no token {' and no '.join(missing)}, which masking needs", fix)
        return
    if tokenizer.pad != 0:
        yield Problem(
            f"the padding token of the tokenizer has id {tokenizer.pad}, but masked language models mask id 0",
            "put [PAD] in the first line of --vocab-file, and make the data again",
        )
    if needs_sentinels and not _sentinels(tokenizer):
        yield Problem(
            "the tokenizer has no sentinels <extra_id_0>, <extra_id_1>, .., which stand for spans", fix
        )


def _sentinels(tokenizer: Tokenizer) -> tuple[int, ...]:
    ids = tokenizer.ids if isinstance(tokenizer, LibraryTokenizer) else {}
    names = itertools.takewhile(ids.__contains__, (f"<extra_id_{number}>" for number in itertools.count()))
    return tuple(ids[name] for name in names)
