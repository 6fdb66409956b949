"""Text to token ids and back, by Megatron-LM's names of tokenizer types.

TokenizerConfig (type, files) -> load_tokenizer -> Tokenizer
"""

from __future__ import annotations

import difflib
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from megatrain.config.errors import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import tokenizers

    from megatrain.config.tokenizer import TokenizerConfig

TOKENIZER_TYPES: Final = ("HuggingFaceTokenizer", "NullTokenizer")
END_OF_DOCUMENT: Final = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
"""Looked for, in this order, when no tokenizer_config.json names the token."""
OTHER_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "cls_token", "mask_token")
NO_PAD: Final = -1


class Tokenizer(Protocol):
    """What data and training need to know about a tokenizer."""

    vocab_size: int
    """All ids are below it; before padding for tensor parallelism."""
    eod: int
    """The id that ends a document."""
    pad: int
    """The padding id, -1 if there is none. It counts as padding in data by the rule of `gpt.effective_pad`."""
    special_ids: frozenset[int]
    """Ids with a role other than padding."""
    fingerprint: str
    """Equal for tokenizers that give equal ids, whatever their file's layout."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with no token added at either end."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts, faster than one by one."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Make the tokenizer that a configuration describes.

    Raises:
        ConfigError: the type is unknown, or what it needs was not given or is not usable.
    """
    kind, model, vocab_size = config.tokenizer_type, config.tokenizer_model, config.vocab_size
    if kind == "NullTokenizer":
        if vocab_size is None or vocab_size < 1:
            raise ConfigError(
                "--tokenizer-type NullTokenizer needs a vocabulary size", fix="give --vocab-size"
            )
        return NullTokenizer(vocab_size)
    if kind == "HuggingFaceTokenizer":
        if model is None:
            raise ConfigError(
                "--tokenizer-type HuggingFaceTokenizer needs a file",
                fix="give --tokenizer-model: a tokenizer.json, or a folder with one",
            )
        return HuggingFaceTokenizer(Path(model))
    near = difflib.get_close_matches(str(kind), TOKENIZER_TYPES, n=1)
    raise ConfigError(
        f"--tokenizer-type {kind} is unknown",
        fix=f"use {near[0] if near else ' or '.join(TOKENIZER_TYPES)}",
    )


class NullTokenizer:
    """Text that already is numbers: `encode("5 3")` is [5, 3]. The last id ends documents."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1
        self.pad = NO_PAD
        self.special_ids = frozenset({self.eod})
        self.fingerprint = _fingerprint({"type": "NullTokenizer", "vocab_size": vocab_size})

    def encode(self, text: str) -> list[int]:
        """The numbers of a text. Raises ValueError where there is none or it is no id."""
        ids = [int(word) for word in text.split()]
        wrong = next((number for number in ids if not 0 <= number < self.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"id {wrong} is outside the vocabulary of {self.vocab_size}")
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The numbers of many texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The numbers, with blanks between."""
        return " ".join(map(str, ids))


class HuggingFaceTokenizer:
    """A `tokenizer.json` of the `tokenizers` library; `tokenizer_config.json` beside it names the special tokens."""

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise InputError(
                f"{file}: there is no such file",
                fix="give --tokenizer-model a tokenizer.json or a folder with one; a model's name on the hub is not "
                f"looked up: download it first (hf download {path} --include 'tokenizer*')",
            )
        definition = _read_json(file)
        config_file = file.with_name("tokenizer_config.json")
        config = _read_json(config_file) if config_file.is_file() else {}
        self._tokenizer = _make(file)
        # A file may ask for cutting and filling up, which belongs to inference and would damage documents.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        definition.update(truncation=None, padding=None)
        self.fingerprint = _fingerprint(definition)
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1  # not their number: there may be gaps
        self.eod = self._end_of_document(config, file)
        named = (self._named(config, key) for key in OTHER_SPECIAL)
        self.special_ids = frozenset({self.eod, *(number for number in named if number is not None)})
        pad = self._named(config, "pad_token")
        self.pad = NO_PAD if pad is None else pad

    def encode(self, text: str) -> list[int]:
        """Ids of a text. The text of a special token becomes that token."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts."""
        return [
            encoding.ids
            for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _named(self, config: dict[str, Any], key: str) -> int | None:
        """The id of a token that tokenizer_config.json names, as a string or as an object with its content."""
        token = config.get(key)
        if isinstance(token, dict):
            token = token.get("content")
        return self._tokenizer.token_to_id(token) if isinstance(token, str) else None

    def _end_of_document(self, config: dict[str, Any], file: Path) -> int:
        found = self._named(config, "eos_token")
        candidates = (self._tokenizer.token_to_id(token) for token in END_OF_DOCUMENT)
        number = found if found is not None else next((one for one in candidates if one is not None), None)
        if number is None:
            raise InputError(
                f"{file}: no end-of-document token: tokenizer_config.json names no eos_token of the vocabulary, "
                f"and it has none of {', '.join(END_OF_DOCUMENT)}",
                fix=f'put {{"eos_token": "..."}} with a token of the vocabulary into '
                f"{file.with_name('tokenizer_config.json')}",
            )
        return number


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{file}: cannot be read: {error}", fix="download or copy the tokenizer again"
        ) from error
    if not isinstance(content, dict):
        raise InputError(f"{file}: holds no JSON object", fix="download or copy the tokenizer again")
    return content


def _make(file: Path) -> tokenizers.Tokenizer:
    import tokenizers  # noqa: PLC0415 - loading the library takes a while, and most processes need no tokenizer

    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise InputError(
            f"{file}: not a tokenizer of the `tokenizers` library: {error}",
            fix="convert it with transformers' AutoTokenizer(...).save_pretrained(folder)",
        ) from error


def _fingerprint(definition: dict[str, Any]) -> str:
    """SHA-256 of the definition without its layout: keys sorted, no blanks."""
    canonical = json.dumps(definition, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()
