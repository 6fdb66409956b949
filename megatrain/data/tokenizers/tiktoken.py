"""TikTokenizer: byte-pair encoding by the tiktoken library, with special tokens first.

    ids   0 .. 999           special tokens: the named ones, then <SPECIAL_7>, <SPECIAL_8>, ...
          1000 .. 131071     tokens of the file, by rank, up to --vocab-size

The file is a JSON list; entry i is {"rank": i, "token_bytes": base64, "token_str": readable text}. The first 256 tokens
are the bytes. Mistral's tekken.json contains such a list under its key `vocab`.
"""

from __future__ import annotations

import base64
import binascii
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from megatrain.config.errors import ConfigError, InputError
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.files import optional_package
from megatrain.data.tokenizers.files import GET_AGAIN, NO_PAD, Kind, TokenizerFile, read_file
from megatrain.data.tokenizers.hf_tokenizer import HfTokenizer, known_roles, pair_merges
from megatrain.data.tokenizers.identity import characters_of_bytes, fingerprint_of, full_fingerprint

DEFAULT_VOCAB_SIZE: Final = 2**17
"""Maximum vocabulary size if --vocab-size is not given."""
END, PAD = "</s>", "<pad>"
_ROLES: Final = {
    "unk_token": "<unk>",
    "bos_token": "<s>",
    "eos_token": END,
    "mask_token": "<mask>",
    "pad_token": PAD,
    "cls_token": "<cls>",
    "sep_token": "<sep>",
}
NAMED: Final = tuple(_ROLES.values())
"""Special tokens in the order of their ids."""

_LEAD: Final = r"[^\r\n\p{L}\p{N}]?"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BLANKS: Final = (r"\s+(?!\S)", r"\s+")
PATTERNS: Final = {
    "v1": "|".join((_LEAD + r"+\p{L}+", r"\p{N}", r" ?[^\s\p{L}\p{N}]++[\r\n]*", r"\s*[\r\n]", *_BLANKS)),
    "v2": "|".join(
        (
            f"{_LEAD}{_UPPER}*{_LOWER}+",
            f"{_LEAD}{_UPPER}+{_LOWER}*",
            r"\p{N}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            *_BLANKS,
        )
    ),
}
"""Megatron-LM's patterns that split a text before merging. Ids depend on every character of them."""


class TikTokenizer:
    """A tiktoken vocabulary. </s> ends documents; the text of a special token is encoded as that token."""

    def __init__(self, config: TokenizerConfig) -> None:
        file = read_file(Path(config.tokenizer_model or ""), Kind.TIKTOKEN_JSON, flag="--tokenizer-model")
        special = _special_tokens(config)
        self.vocab_size = _vocab_size(config, file)
        tokens = _tokens(file, self.vocab_size - len(special))
        self._library = optional_package("tiktoken", needed_for="--tokenizer-type TikTokenizer").Encoding(
            name=file.path.stem,
            pat_str=PATTERNS[config.tiktoken_pattern],
            mergeable_ranks={token: rank + len(special) for rank, token in enumerate(tokens)},
            special_tokens={token: number for number, token in enumerate(special)},
        )
        named = tuple(config.tokenizer_special_tokens) or NAMED
        self.eod: int | None = named.index(END)
        self.pad = named.index(PAD) if PAD in named else NO_PAD
        self.special_ids = frozenset(range(len(named))) - {self.pad}
        self.note: str | None = None
        self._pattern, self._special, self._tokens = config.tiktoken_pattern, special, tokens

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return the digests of ids and of the definition."""
        definition = {
            "pattern": self._pattern,
            "special": self._special,
            "tokens": [token.hex() for token in self._tokens],
        }
        vocabulary = {token: number for number, token in enumerate([*self._special, *self._pieces()])}
        return full_fingerprint(vocabulary, self.encode, fingerprint_of(definition), special=self._special)

    def _pieces(self) -> list[str]:
        """Return the tokens as a byte-level vocabulary writes them."""
        written = characters_of_bytes()
        return ["".join(map(written.__getitem__, token)) for token in self._tokens]

    def to_hf(self) -> HfTokenizer:
        """Return the vocabulary as byte-level BPE.

        Raises:
            InputError: a token has the text of a special one, and both would be one entry there.
        """
        import tokenizers  # noqa: PLC0415 - slow to load
        from tokenizers import decoders, models, pre_tokenizers  # noqa: PLC0415

        pieces = self._pieces()
        twice = sorted(set(pieces) & set(self._special))
        if twice:
            raise InputError(
                f"{twice[0]} is an ordinary token of the vocabulary and a special one, and a tokenizer.json has it once",
                fix="export the weights alone: megatrain checkpoint export-weights",
            )
        ids = {piece: number for number, piece in enumerate(pieces, len(self._special))}
        special = {token: number for number, token in enumerate(self._special)}
        merges = pair_merges(pieces, ids)
        library = tokenizers.Tokenizer(models.BPE(vocab=special | ids, merges=merges, ignore_merges=True))
        split = pre_tokenizers.Split(tokenizers.Regex(PATTERNS[self._pattern]), "isolated")
        library.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        library.decoder = decoders.ByteLevel()
        library.add_special_tokens(self._special)
        return HfTokenizer(library.to_str(pretty=True).encode(), known_roles(_ROLES, self._special))

    def encode(self, text: str) -> list[int]:
        """Tokenize a text."""
        return list(self._library.encode(text, allowed_special="all", disallowed_special=()))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize many texts. One thread: preprocessing has its own processes."""
        return list(
            self._library.encode_batch(
                list(texts), num_threads=1, allowed_special="all", disallowed_special=()
            )
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Convert ids to text, including special tokens."""
        return str(self._library.decode(list(ids)))


def _special_tokens(config: TokenizerConfig) -> list[str]:
    """Return the special tokens: the named ones, filled up to the number of reserved ids."""
    named = list(config.tokenizer_special_tokens) or list(NAMED)
    count = config.tiktoken_num_special_tokens
    if len(named) > count:
        raise ConfigError(
            f"--tiktoken-num-special-tokens {count} is too small for {len(named)} special tokens",
            fix=f"use --tiktoken-num-special-tokens {len(named)} or more",
        )
    tokens = named + [f"<SPECIAL_{number}>" for number in range(len(named), count)]
    twice = next((token for token in tokens if tokens.count(token) > 1), None)
    if twice is not None or END not in named:
        wrong = f"{END}, which ends documents, is missing" if twice is None else f"{twice} occurs twice"
        raise ConfigError(
            f"--tokenizer-special-tokens {' '.join(named)}: {wrong}",
            fix=f"give every token once, including {END}; Megatron-LM also requires {' '.join(NAMED)}",
        )
    return tokens


def _vocab_size(config: TokenizerConfig, file: TokenizerFile) -> int:
    special, total = config.tiktoken_num_special_tokens, config.tiktoken_num_special_tokens + len(file.data)
    size = min(total, DEFAULT_VOCAB_SIZE) if config.vocab_size is None else config.vocab_size
    if size > total:
        raise ConfigError(
            f"--vocab-size {size} is more than the {len(file.data)} tokens of {file.path} and"
            f" --tiktoken-num-special-tokens {special} = {total}",
            fix=f"use --vocab-size {total} or less, or leave it out",
        )
    if size < special + 256:
        raise ConfigError(
            f"a vocabulary of {size} is too small for --tiktoken-num-special-tokens {special} and the 256 bytes",
            fix=f"use --vocab-size {special + 256} or more, and a file with 256 tokens or more",
        )
    return size


def _tokens(file: TokenizerFile, count: int) -> list[bytes]:
    """Return the bytes of the first `count` tokens, by rank."""
    tokens = [_token(file, rank, entry) for rank, entry in enumerate(file.data[:count])]
    first = {token: rank for rank, token in reversed(list(enumerate(tokens)))}
    for rank, token in enumerate(tokens):
        if first[token] != rank:
            raise InputError(
                f"{file.path}: entries {first[token]} and {rank} are the same token", fix=GET_AGAIN
            )
    return tokens


def _token(file: TokenizerFile, rank: int, entry: Any) -> bytes:
    try:
        token = base64.b64decode(entry["token_bytes"], validate=True)
        is_right = entry["rank"] == rank and (rank >= 256 or token == bytes([rank])) and token
    except (TypeError, KeyError, ValueError, binascii.Error):
        is_right = False
    if not is_right:
        raise InputError(
            f"{file.path}: entry {rank} is {str(entry)[:100]}, not a token of rank {rank} with its bytes in base64"
            + ("; the first 256 must be the bytes, in order" if rank < 256 else ""),
            fix=GET_AGAIN,
        )
    return token
