"""The tokenizer that the data was made with, and which settings each type of tokenizer reads.

    TokenizerConfig ──> tokenizer_problems: what its type needs, and what it does not read

Rules and `load_tokenizer` both ask here, so that a problem has one wording and is told once.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

from megatrain.config.errors import Problem
from megatrain.config.schema.values import CheckedSection, in_range


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(CheckedSection):
    """Tokenizer: how text became token numbers."""

    tokenizer_type: (
        Literal[
            "HuggingFaceTokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "TikTokenizer",
            "GPT2BPETokenizer",
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "NullTokenizer",
            "SFTTokenizer",
            "MultimodalTokenizer",
            "NullMultimodalTokenizer",
        ]
        | None
    ) = None
    """Kind of the tokenizer. NullTokenizer reads no file: token numbers below --vocab-size, the last one ends a document unless --null-tokenizer-eod-id says another. SFTTokenizer and the multimodal ones are not there."""
    tokenizer_model: str | None = None
    """The tokenizer's file or folder; a model's name on the hub is not looked up."""
    vocab_size: int | None = field(default=None, metadata=in_range(at_least=1))
    """Number of tokens, before padding, where no tokenizer file says it. TikTokenizer uses the first so many of its file, 131072 if left out."""
    vocab_file: str | None = None
    """Vocabulary: vocab.json of GPT2BPETokenizer, vocab.txt of the BertWordPiece types."""
    merge_file: str | None = None
    """Merges of GPT2BPETokenizer: the merges.txt that belongs to --vocab-file."""
    tiktoken_pattern: Literal["v1", "v2"] = "v2"
    """How TikTokenizer cuts text into words: v2 also cuts words where upper case follows lower case."""
    tiktoken_num_special_tokens: int = field(default=1000, metadata=in_range(at_least=1))
    """Ids that TikTokenizer keeps for special tokens, before those of the file."""
    tokenizer_special_tokens: tuple[str, ...] = ()
    """Special tokens. TikTokenizer: all that have a name, in the order of their ids; other types: added behind the vocabulary."""
    tokenizer_hf_no_include_special_tokens: bool = False
    """Leave out the beginning and end tokens that the tokenizer's own template puts around every text, as those of Llama 3 and BERT do."""
    null_tokenizer_eod_id: int | None = field(default=None, metadata=in_range(at_least=0))
    """Token number that ends a document, for NullTokenizer; the last one of --vocab-size if left out. Give that of the tokenizer that made the data."""
    null_tokenizer_pad_id: int = field(default=-1, metadata=in_range(at_least=-1))
    """Token number of padding, for NullTokenizer; -1: none."""


def tokenizer_problems(config: TokenizerConfig) -> Iterator[Problem]:
    """What the type of a tokenizer needs and was not given, and what it was given and does not read."""
    kind, given = config.tokenizer_type, _given(config)
    if kind is None:
        yield _no_type(given)
    elif kind in _REFUSED:
        yield Problem(f"--tokenizer-type {kind} is not there", _REFUSED[kind])
    elif kind not in _NEEDED:
        near = difflib.get_close_matches(kind, _NEEDED, n=1)
        yield Problem(f"--tokenizer-type {kind} is unknown", f"use {near[0] if near else _either(_NEEDED)}")
    else:
        for name, what in _NEEDED[kind].items():
            if name not in given:
                yield Problem(
                    f"--tokenizer-type {kind} is given without {_flag(name)}", f"give {_flag(name)}, {what}"
                )
        strays = {name: value for name, value in given.items() if name not in _settings_of(kind)}
        if strays:
            yield Problem(
                f"{_said(strays)} {_are(strays)} not read by --tokenizer-type {kind}",
                f"leave {'them' if len(strays) > 1 else 'it'} out, or use --tokenizer-type {_readers(strays)}",
            )
        if kind == "NullTokenizer":
            yield from _null_problems(config)


def missing_end_of_document(config: TokenizerConfig, *, needed_by: str) -> Problem:
    """What to tell a user whose tokenizer names no end-of-document token, which this flag needs."""
    kind = config.tokenizer_type or "NullTokenizer"
    source = config.tokenizer_model or config.vocab_file
    fixes = {
        "HuggingFaceTokenizer": 'put {"eos_token": "..."} with a token of the vocabulary into tokenizer_config.json beside'
        " the tokenizer.json",
        "GPT2BPETokenizer": "use the vocabulary of GPT-2, or add <|endoftext|> to this one",
    }
    fix = fixes.get(kind, "use a model that was trained with an end token (spm_train --eos_id)")
    return Problem(
        f"{needed_by} needs an end-of-document token, and {source or f'--tokenizer-type {kind}'} names none",
        f"{fix}; or leave {needed_by} out",
    )


_SENTENCEPIECE: Final = {"tokenizer_model": "a SentencePiece model, such as tokenizer.model"}
_WORD_PIECES: Final = {"vocab_file": "a vocab.txt with one token a line"}
_NEEDED: Final[Mapping[str, Mapping[str, str]]] = {
    "HuggingFaceTokenizer": {"tokenizer_model": "a tokenizer.json or a folder with one"},
    "SentencePieceTokenizer": _SENTENCEPIECE,
    "GPTSentencePieceTokenizer": _SENTENCEPIECE,
    "Llama2Tokenizer": _SENTENCEPIECE,
    "TikTokenizer": {"tokenizer_model": "a JSON list of rank, token_bytes and token_str"},
    "GPT2BPETokenizer": {"vocab_file": "a vocab.json", "merge_file": "the merges.txt that belongs to it"},
    "BertWordPieceLowerCase": _WORD_PIECES,
    "BertWordPieceCase": _WORD_PIECES,
    "NullTokenizer": {"vocab_size": "the number of tokens"},
}
"""By type: what it cannot do without, and what that is."""
_ADDED: Final = ("tokenizer_special_tokens", "tokenizer_hf_no_include_special_tokens")
_TAKEN: Final[Mapping[str, tuple[str, ...]]] = {
    "HuggingFaceTokenizer": _ADDED,
    "TikTokenizer": ("tiktoken_pattern", "tiktoken_num_special_tokens", "tokenizer_special_tokens"),
    "GPT2BPETokenizer": _ADDED,
    "BertWordPieceLowerCase": _ADDED,
    "BertWordPieceCase": ("tokenizer_hf_no_include_special_tokens",),
    "NullTokenizer": ("null_tokenizer_eod_id", "null_tokenizer_pad_id"),
}
"""By type: what else it reads. A size is welcome everywhere, and compared with the file's."""
_REFUSED: Final = {
    "SFTTokenizer": "use --tokenizer-type HuggingFaceTokenizer with the same folder: this trains on documents, not on chats",
    "MultimodalTokenizer": "use --tokenizer-type HuggingFaceTokenizer with the same folder: this trains on text alone",
    "NullMultimodalTokenizer": "use --tokenizer-type NullTokenizer: this trains on text alone",
}


def _null_problems(config: TokenizerConfig) -> Iterator[Problem]:
    """Ids of NullTokenizer that no token has."""
    ids = {
        "null_tokenizer_eod_id": config.null_tokenizer_eod_id,
        "null_tokenizer_pad_id": config.null_tokenizer_pad_id,
    }
    for name, number in ids.items():
        if config.vocab_size is not None and number is not None and number >= config.vocab_size:
            yield Problem(
                f"{_flag(name)} {number} is outside the vocabulary: --vocab-size {config.vocab_size}"
                f" has ids up to {config.vocab_size - 1}",
                f"give an id of the vocabulary, or --vocab-size {number + 1} or more",
            )


def _no_type(given: Mapping[str, Any]) -> Problem:
    files = {name: value for name, value in given.items() if name != "vocab_size"}
    if files:
        return Problem(
            f"{_said(files)} {_are(files)} given without --tokenizer-type",
            f"add --tokenizer-type {_readers(files)}",
        )
    return Problem(
        "there is no tokenizer: --tokenizer-type is not given",
        "give --tokenizer-type HuggingFaceTokenizer with --tokenizer-model, or --tokenizer-type NullTokenizer with"
        " --vocab-size; --vocab-size alone is enough with --mock-data",
    )


def _given(config: TokenizerConfig) -> dict[str, Any]:
    """Settings beside the type that differ from their defaults."""
    values = {entry.name: (getattr(config, entry.name), entry.default) for entry in fields(config)}
    del values["tokenizer_type"]
    # A checkpoint gives lists where the command line gives tuples; an empty one says nothing.
    return {
        name: value
        for name, (value, default) in values.items()
        if value != default and not (isinstance(value, list) and not value)
    }


def _settings_of(kind: str) -> tuple[str, ...]:
    return (*_NEEDED[kind], *_TAKEN.get(kind, ()), "vocab_size")


def _readers(names: Mapping[str, Any]) -> str:
    """Types that read all of these, or else the first of them."""
    kinds = [kind for kind in _NEEDED if set(names) <= set(_settings_of(kind))]
    return _either(kinds or [kind for kind in _NEEDED if next(iter(names)) in _settings_of(kind)])


def _either(words: Mapping[str, Any] | list[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def _said(given: Mapping[str, Any]) -> str:
    return " and ".join(
        f"{_flag(name)} {' '.join(value) if isinstance(value, tuple | list) else value}"
        for name, value in given.items()
    )


def _are(given: Mapping[str, Any]) -> str:
    return "are" if len(given) > 1 else "is"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
