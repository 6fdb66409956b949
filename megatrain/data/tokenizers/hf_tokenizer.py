"""A tokenizer in the form that transformers reads: tokenizer.json and the names of its special tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Piece = TypeVar("Piece", str, bytes)


@dataclass(frozen=True)
class HfTokenizer:
    """A tokenizer of the `tokenizers` library that gives the same ids."""

    definition: bytes
    """The content of tokenizer.json."""
    roles: Mapping[str, str]
    """Text of special tokens by role, such as `eos_token`."""
    matches_special: bool = True
    """The text of a special token is encoded as that token."""


def pair_merges(ordered: Iterable[Piece], pieces: Mapping[Piece, int]) -> list[tuple[Piece, Piece]]:
    """Return the merges of a vocabulary that merges any two pieces whose concatenation is a piece, the first of `ordered` first.

    The `tokenizers` library ranks pairs, and SentencePiece and tiktoken rank the piece that a pair becomes.
    """
    return [pair for piece in ordered for pair in _pairs(piece, pieces)]


def _pairs(piece: Piece, pieces: Mapping[Piece, int]) -> list[tuple[Piece, Piece]]:
    cuts = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
    found = [pair for pair in cuts if pair[0] in pieces and pair[1] in pieces]
    return sorted(found, key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))


def known_roles(roles: Mapping[str, str], tokens: Collection[str]) -> dict[str, str]:
    """Return the roles whose token is one of `tokens`; transformers would add the others to the vocabulary."""
    return {role: token for role, token in roles.items() if token in tokens}
