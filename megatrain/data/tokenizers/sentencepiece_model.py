"""A SentencePiece model as a tokenizer of the `tokenizers` library with the same ids.

    protobuf ──> pieces with scores and types, normalization ──> normalizer, BPE or Unigram, decoder

Differences of the two libraries that are resolved here:

* SentencePiece matches no control, unknown or byte piece in text. Unigram of the other library matches every piece, so that text
  is split inside the text of these pieces, between two characters that no ordinary piece has side by side.
* User-defined pieces are always matched. In Unigram their score ensures it; BPE looks them up after a split at each of them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from megatrain.config.errors import InputError
from megatrain.data.tokenizers.hf_tokenizer import pair_merges

if TYPE_CHECKING:
    import tokenizers

SPACE: Final = "▁"
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_UNIGRAM, _BPE, _CHAR = 1, 2, 4
_NONCHARACTERS: Final = range(0xFDD0, 0xFDF0)
"""Code points that no text has; they stand for user-defined pieces while characters are mapped, which leaves these pieces alone."""


@dataclass(frozen=True)
class Piece:
    """A piece of a model."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    """The parts of a model that determine ids; see sentencepiece_model.proto of the library."""

    pieces: tuple[Piece, ...]
    algorithm: int
    has_byte_fallback: bool
    has_suffix: bool
    """The space of a word follows it."""
    charsmap: bytes
    has_dummy_prefix: bool
    removes_spaces: bool
    escapes_spaces: bool

    @classmethod
    def parse(cls, content: bytes) -> SentencePieceModel:
        """Parse a model that the library has loaded."""
        parts = list(_fields(content))
        pieces = [dict(_fields(value)) for number, value in parts if number == 1]
        trainer = dict(_fields(b"".join(value for number, value in parts if number == 2)))
        normalizer = dict(_fields(b"".join(value for number, value in parts if number == 3)))
        return cls(
            pieces=tuple(
                Piece(one[1].decode(), struct.unpack("<f", one.get(2, bytes(4)))[0], one.get(3, _NORMAL))
                for one in pieces
            ),
            algorithm=trainer.get(3, _UNIGRAM),
            has_byte_fallback=bool(trainer.get(35, 0)),
            has_suffix=bool(trainer.get(24, 0)),
            charsmap=normalizer.get(2, b""),
            has_dummy_prefix=bool(normalizer.get(3, 1)),
            removes_spaces=bool(normalizer.get(4, 1)),
            escapes_spaces=bool(normalizer.get(5, 1)),
        )

    def texts(self, *kinds: int) -> list[str]:
        """Return the pieces of these types."""
        return [piece.text for piece in self.pieces if piece.kind in kinds]


def library_tokenizer(content: bytes, *, special: Sequence[str]) -> tokenizers.Tokenizer:
    """Return a tokenizer of the `tokenizers` library with the ids of a model.

    Args:
        content: the model.
        special: pieces with a role.

    Raises:
        InputError: the other library has no such model.
    """
    import tokenizers  # noqa: PLC0415 - slow to load

    model = SentencePieceModel.parse(content)
    if model.has_suffix or model.algorithm not in (_UNIGRAM, _BPE, _CHAR):
        kind = "spaces after words" if model.has_suffix else "whole words as pieces"
        raise InputError(
            f"the SentencePiece model has {kind}, which the `tokenizers` library lacks: it has no tokenizer.json",
            fix="export the weights alone: megatrain checkpoint export-weights",
        )
    symbols = model.texts(_USER)
    are_added = bool(symbols) and model.algorithm != _UNIGRAM and not _changes_ends(model)
    library = tokenizers.Tokenizer(_unigram(model) if model.algorithm == _UNIGRAM else _bpe(model, are_added))
    _set_pipeline(library, model, splits=_splits(model, are_added))
    if are_added:
        library.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in symbols])
    library.add_special_tokens(list(special))
    return library


def _changes_ends(model: SentencePieceModel) -> bool:
    """Return whether normalization changes the ends of a text, so that text between two symbols is not a text."""
    return model.has_dummy_prefix or model.removes_spaces


def _unigram(model: SentencePieceModel) -> Any:
    from tokenizers import models  # noqa: PLC0415 - slow to load

    best = max((piece.score for piece in model.pieces if piece.kind == _NORMAL), default=0.0)
    vocab = [
        (piece.text, len(piece.text.encode()) * best - 0.1 if piece.kind == _USER else piece.score)
        for piece in model.pieces
    ]
    unknown = [piece.kind for piece in model.pieces].index(_UNKNOWN)
    return models.Unigram(vocab, unk_id=unknown, byte_fallback=model.has_byte_fallback)


def _bpe(model: SentencePieceModel, are_added: bool) -> Any:
    from tokenizers import models  # noqa: PLC0415 - slow to load

    ids = {piece.text: number for number, piece in enumerate(model.pieces)}
    mergeable = {piece.text: ids[piece.text] for piece in model.pieces if piece.kind in (_NORMAL, _UNUSED)}
    ordered = sorted(mergeable, key=lambda text: -model.pieces[ids[text]].score)
    return models.BPE(
        vocab=ids,
        merges=[] if model.algorithm == _CHAR else pair_merges(ordered, mergeable),
        unk_token=model.texts(_UNKNOWN)[0],
        fuse_unk=True,
        byte_fallback=model.has_byte_fallback,
        ignore_merges=bool(model.texts(_USER)) and not are_added,
    )


def _splits(model: SentencePieceModel, are_added: bool) -> list[str]:
    """Return regular expressions at whose matches text is split."""
    symbols, ordinary = model.texts(_USER), model.texts(_NORMAL, _UNUSED)
    is_unigram = model.algorithm == _UNIGRAM
    found = []
    if symbols and not is_unigram and not are_added:
        found.append("|".join(map(re.escape, sorted(symbols, key=len, reverse=True))))
    if is_unigram or found:
        pairs = {text[at : at + 2] for text in ordinary for at in range(len(text) - 1)}
        reserved = [text for text in model.texts(_UNKNOWN, _CONTROL, _BYTE) if len(text) > 1]
        found.append("|".join(_inside(text, pairs, set(ordinary)) for text in reserved))
    return [pattern for pattern in found if pattern]


def _inside(text: str, pairs: set[str], ordinary: set[str]) -> str:
    """Return the pattern of a place inside a text where no piece and no run of unknown characters extends over both sides."""
    free = [at for at in range(1, len(text)) if text[at - 1 : at + 1] not in pairs]
    at = next((at for at in free if not ordinary.isdisjoint(text[at - 1 : at + 1])), 1)
    return f"(?<={re.escape(text[:at])})(?={re.escape(text[at:])})"


def _set_pipeline(library: tokenizers.Tokenizer, model: SentencePieceModel, *, splits: Sequence[str]) -> None:
    """Set the normalizer, the splits and the decoder."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers  # noqa: PLC0415 - slow to load

    steps: list[Any] = []
    if model.charsmap:
        mapped = normalizers.Precompiled(model.charsmap)
        changed = [text for text in model.texts(_USER) if mapped.normalize_str(text) != text]
        kept = dict(zip(sorted(changed, key=len, reverse=True), map(chr, _NONCHARACTERS), strict=False))
        steps += [normalizers.Replace(text, character) for text, character in kept.items()]
        # The library maps the first character of this grapheme and loses the other one.
        steps += [normalizers.Replace("\r\n", mapped.normalize_str("\r") + mapped.normalize_str("\n"))]
        steps += [mapped, *(normalizers.Replace(character, text) for text, character in kept.items())]
    if model.removes_spaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps += [normalizers.Prepend(SPACE)] if model.has_dummy_prefix else []
    steps += [normalizers.Replace(" ", SPACE)] if model.escapes_spaces else []
    if steps:
        library.normalizer = normalizers.Sequence(steps)
    if splits:
        library.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splits]
        )
    chain: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    chain += [decoders.Strip(" ", 1, 0)] if model.has_dummy_prefix else []
    library.decoder = decoders.Sequence(chain)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield numbers and values of the fields of a protobuf message: integers, or bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if size is None:
            size, at = _varint(data, at)
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the integer of variable length at a place, and the place after it."""
    value, shift = 0, 0
    while True:
        byte = data[at]
        value, at, shift = value | (byte & 0x7F) << shift, at + 1, shift + 7
        if byte < 0x80:
            return value, at
