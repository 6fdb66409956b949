"""Bytes of each token, for bits per byte: of the text that the token is decoded to, in UTF-8.

byte-level BPE   one byte a character of the piece: exact
SentencePiece    its text, the sign of a space as one byte; <0x0A> is one byte. A space that is added before a document counts
WordPiece        its text, with a space before all but ##pieces

Special tokens have no text: 0 bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from megatrain.data.files import optional_package
from megatrain.data.tokenizers.build import Tokenizer

_BYTE = re.compile("<0x[0-9A-F]{2}>")


def token_byte_counts(tokenizer: Tokenizer) -> list[int] | None:
    """Return the bytes of each id of the vocabulary; None: the tokenizer has no text.

    Raises:
        InputError: it has no form in which pieces are known, see `Tokenizer.to_hf`.
    """
    form = tokenizer.to_hf()
    if form is None:
        return None
    definition = json.loads(form.definition)
    library = optional_package("tokenizers", needed_for="bits per byte").Tokenizer.from_str(
        form.definition.decode()
    )
    added = library.get_added_tokens_decoder()
    kinds = set(_types(definition.get("decoder")))
    counts = []
    for number in range(tokenizer.vocab_size):
        if number in added:
            text = "" if added[number].special or number in tokenizer.special_ids else added[number].content
            counts.append(len(text.encode()))
            continue
        counts.append(_bytes_of(library.id_to_token(number) or "", kinds))
    return counts


def _bytes_of(piece: str, kinds: set[str]) -> int:
    if "ByteLevel" in kinds:
        return len(piece)
    if "ByteFallback" in kinds and _BYTE.fullmatch(piece):
        return 1
    if "WordPiece" in kinds:
        return len(piece[2:].encode()) if piece.startswith("##") else 1 + len(piece.encode())
    return len(piece.replace("▁", " ").encode())


def _types(decoder: Any) -> Iterator[str]:
    """Yield the types of a decoder and of the decoders in it."""
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for part in decoder.get("decoders", ()):
            yield from _types(part)
