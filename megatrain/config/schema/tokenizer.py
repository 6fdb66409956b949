"""Settings of the tokenizer, and the settings that each type requires and reads.

    TokenizerConfig ──> tokenizer_problems: missing settings, and settings that the type does not read

Rules and `load_tokenizer` share these checks, so that a problem has one wording and is reported once.
"""

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from megatrain.config.errors import Problem
from megatrain.config.schema.resume_class import SAFE, VOCABULARY
from megatrain.config.schema.setting import ARGS, Section, setting


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Section, on_resume=SAFE, taken_by=ARGS):
    """Tokenizer: conversion of text to token ids."""

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
    """Type of the tokenizer. NullTokenizer reads no file: its tokens are numbers below --vocab-size, and the last one ends a document unless --null-tokenizer-eod-id is given. SFTTokenizer and the multimodal types are not supported."""
    tokenizer_model: str | None = None
    """File or folder of the tokenizer. Names on the Hugging Face hub are not downloaded."""
    vocab_size: int | None = setting(None, at_least=1, on_resume=VOCABULARY)
    """Number of tokens before padding, if no tokenizer file has it. With a file, up to its padded size: the softmax counts the rows of padding, as in Megatron-LM. TikTokenizer uses this many tokens of its file, 131072 by default."""
    vocab_file: str | None = None
    """Vocabulary file: vocab.json for GPT2BPETokenizer, vocab.txt for the BertWordPiece types."""
    merge_file: str | None = None
    """Merges file of GPT2BPETokenizer: the merges.txt for --vocab-file."""
    tiktoken_pattern: Literal["v1", "v2"] = "v2"
    """Word-splitting pattern of TikTokenizer; v2 also splits between lower and upper case."""
    tiktoken_num_special_tokens: int = setting(1000, at_least=1)
    """Ids that TikTokenizer reserves for special tokens, before those of the file."""
    tokenizer_special_tokens: tuple[str, ...] = ()
    """Special tokens. TikTokenizer: all named ones, in the order of their ids; other types: appended to the vocabulary."""
    tokenizer_hf_no_include_special_tokens: bool = False
    """Omit the beginning and end tokens that the tokenizer's template adds to every text, as for Llama 3 and BERT."""
    null_tokenizer_eod_id: int | None = setting(None, at_least=0)
    """End-of-document token id for NullTokenizer: that of the tokenizer that made the data. none: the last id of --vocab-size."""
    null_tokenizer_pad_id: int = setting(-1, at_least=-1)
    """Padding token id for NullTokenizer. -1: none."""


def tokenizer_problems(config: TokenizerConfig) -> Iterator[Problem]:
    """Report settings that the tokenizer type requires, and settings that it does not read."""
    kind, given = config.tokenizer_type, _given(config)
    if kind is None:
        yield _no_type(given)
    elif kind in _REFUSED:
        yield Problem(f"--tokenizer-type {kind} is not supported", _REFUSED[kind])
    elif kind not in _REQUIRED:
        near = difflib.get_close_matches(kind, _REQUIRED, n=1)
        yield Problem(
            f"--tokenizer-type {kind} is unknown",
            f"use --tokenizer-type {near[0] if near else _either(_REQUIRED)}",
        )
    else:
        for name, description in _REQUIRED[kind].items():
            if name not in given:
                yield Problem(
                    f"--tokenizer-type {kind} is given without {_flag(name)}",
                    f"give {_flag(name)}, {description}",
                )
        unread = {name: value for name, value in given.items() if name not in _settings_of(kind)}
        if unread:
            yield Problem(
                f"{_listed(unread)} {_are(unread)} not read by --tokenizer-type {kind}",
                f"remove {' and '.join(map(_flag, unread))}, or use --tokenizer-type {_readers(unread)}",
            )
        if kind == "NullTokenizer":
            yield from _null_problems(config)


def default_type(family: str, given: Collection[str]) -> str | None:
    """Return the type of a tokenizer that is given by its files alone, as to Megatron-LM's program of a family; None: a type or a file is missing."""
    kind = _DEFAULT.get(family)
    return kind if kind and "tokenizer_type" not in given and _REQUIRED[kind].keys() <= set(given) else None


def missing_end_of_document(config: TokenizerConfig, *, needed_by: str) -> Problem:
    """Return the problem of a flag that needs an end-of-document token, which the tokenizer lacks."""
    kind = config.tokenizer_type or "NullTokenizer"
    source = config.tokenizer_model or config.vocab_file
    fixes = {
        "HuggingFaceTokenizer": 'put {"eos_token": "..."} with a token of the vocabulary into tokenizer_config.json next to'
        " the tokenizer.json",
        "GPT2BPETokenizer": "use the vocabulary of GPT-2, or add <|endoftext|> to this one",
    }
    fix = fixes.get(kind, "use a model that was trained with an end token (spm_train --eos_id)")
    return Problem(
        f"{needed_by} needs an end-of-document token, and {source or f'--tokenizer-type {kind}'} has none",
        f"{fix}; or leave {needed_by} out",
    )


def is_same_tokenizer(fingerprint: str, other: str) -> bool:
    """Return whether two fingerprints are of the same tokenizer: a digest of one, of ids or of a file, is in the other."""
    return not set(fingerprint.split(":")).isdisjoint(other.split(":"))


_SENTENCEPIECE: Final = {"tokenizer_model": "a SentencePiece model, such as tokenizer.model"}
_WORD_PIECES: Final = {"vocab_file": "a vocab.txt with one token a line"}
_REQUIRED: Final[Mapping[str, Mapping[str, str]]] = {
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
"""Required settings by type, with descriptions."""
_DEFAULT: Final = {
    "gpt": "GPT2BPETokenizer",
    "hybrid": "GPT2BPETokenizer",
    "bert": "BertWordPieceLowerCase",
    "t5": "BertWordPieceLowerCase",
}
"""`--tokenizer-type` that Megatron-LM's program of a family has by default."""
_ADDED: Final = ("tokenizer_special_tokens", "tokenizer_hf_no_include_special_tokens")
_OPTIONAL: Final[Mapping[str, tuple[str, ...]]] = {
    "HuggingFaceTokenizer": _ADDED,
    "TikTokenizer": ("tiktoken_pattern", "tiktoken_num_special_tokens", "tokenizer_special_tokens"),
    "GPT2BPETokenizer": _ADDED,
    "BertWordPieceLowerCase": _ADDED,
    "BertWordPieceCase": ("tokenizer_hf_no_include_special_tokens",),
    "NullTokenizer": ("null_tokenizer_eod_id", "null_tokenizer_pad_id"),
}
"""Optional settings by type. Each type reads a vocabulary size too, and compares it with its file."""
_REFUSED: Final = {
    "SFTTokenizer": "use --tokenizer-type HuggingFaceTokenizer with the same folder, and preprocess_data.py --sft for conversations",
    "MultimodalTokenizer": "use --tokenizer-type HuggingFaceTokenizer with the same folder: megatrain trains on text only",
    "NullMultimodalTokenizer": "use --tokenizer-type NullTokenizer: megatrain trains on text only",
}


def _null_problems(config: TokenizerConfig) -> Iterator[Problem]:
    """Report ids of NullTokenizer outside the vocabulary."""
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
            f"{_listed(files)} {_are(files)} given without --tokenizer-type",
            f"add --tokenizer-type {_readers(files)}",
        )
    return Problem(
        "there is no tokenizer: --tokenizer-type is not given",
        "give --tokenizer-type HuggingFaceTokenizer with --tokenizer-model, or --tokenizer-type NullTokenizer with"
        " --vocab-size; --vocab-size alone is enough with --mock-data",
    )


def _given(config: TokenizerConfig) -> dict[str, Any]:
    """Return the settings, except the type, that differ from their defaults."""
    values = {entry.name: (getattr(config, entry.name), entry.default) for entry in fields(config)}
    del values["tokenizer_type"]
    # A checkpoint has lists where the command line has tuples; empty ones are defaults.
    return {
        name: value
        for name, (value, default) in values.items()
        if value != default and not (isinstance(value, list) and not value)
    }


def _settings_of(kind: str) -> tuple[str, ...]:
    return (*_REQUIRED[kind], *_OPTIONAL.get(kind, ()), "vocab_size")


def _readers(names: Mapping[str, Any]) -> str:
    """Return the types that read all of these settings, or else the first of them."""
    kinds = [kind for kind in _REQUIRED if set(names) <= set(_settings_of(kind))]
    return _either(kinds or [kind for kind in _REQUIRED if next(iter(names)) in _settings_of(kind)])


def _either(words: Mapping[str, Any] | list[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def _listed(given: Mapping[str, Any]) -> str:
    return " and ".join(
        f"{_flag(name)} {' '.join(value) if isinstance(value, tuple | list) else value}"
        for name, value in given.items()
    )


def _are(given: Mapping[str, Any]) -> str:
    return "are" if len(given) > 1 else "is"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
