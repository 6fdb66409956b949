r"""Split documents into sentences with the punkt models of nltk, or with syntok, which needs no models, where there are none.

"One. Two.\nThree."  ->  "One."  "Two."  "Three."          keep_newlines:  "One. "  "Two.\n"  "Three."
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from megatrain.config.errors import ConfigError
from megatrain.data.files import optional_package

MAX_CHARS: Final = 1_000_000
"""Longer texts are first cut into parts of this many characters, as in Megatron-LM."""
SYNTOK_LANGUAGES: Final = ("english", "german", "spanish")
_DOWNLOAD: Final = "python -m nltk.downloader punkt_tab"


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    """Settings of sentence splitting."""

    lang: str
    """Language of the model, named as in nltk: english, german, ..."""
    keep_newlines: bool
    """Keep the white space between two sentences at the end of the first one."""
    splitter: Literal["punkt", "syntok"] = "punkt"
    """The package that splits, as `available_splitter` chose it."""


class SpanTokenizer(Protocol):
    """A tokenizer of nltk, or one with its interface."""

    def span_tokenize(self, text: str, /) -> Iterable[tuple[int, int]]:
        """Return start and end of each sentence."""


class SentenceSplitter:
    """Splits texts with a tokenizer of sentences."""

    def __init__(self, tokenizer: SpanTokenizer, *, keep_newlines: bool) -> None:
        self._tokenizer = tokenizer
        self._keep_newlines = keep_newlines

    def __call__(self, text: str) -> list[str]:
        """Split a text into sentences. White space at the end of the text is dropped."""
        return [
            sentence
            for start in range(0, len(text), MAX_CHARS)
            for sentence in self._sentences(text[start : start + MAX_CHARS])
        ]

    def _sentences(self, text: str) -> list[str]:
        spans = list(self._tokenizer.span_tokenize(text))
        ends = [end for _, end in spans]
        if self._keep_newlines:
            ends[:-1] = [start for start, _ in spans[1:]]
        return [text[start:end] for (start, _), end in zip(spans, ends, strict=True)]


class SyntokSentences:
    """The sentences of syntok, which has one set of rules for its languages. Implements `SpanTokenizer`."""

    def __init__(self) -> None:
        self._segmenter = optional_package("syntok.segmenter", needed_for="--split-sentences")

    def span_tokenize(self, text: str) -> Iterator[tuple[int, int]]:
        for paragraph in self._segmenter.analyze(text):
            for tokens in paragraph:
                yield tokens[0].offset, tokens[-1].offset + len(tokens[-1].value)


def available_splitter(lang: str) -> Literal["punkt", "syntok"]:
    """Return the package that splits a language on this machine: punkt where its models are, else syntok.

    Raises:
        ConfigError: there is neither, or the models lack the language.
    """
    try:
        _load_punkt(lang)
    except _NoModelsError as error:
        if find_spec("syntok") is None:
            raise
        if lang not in SYNTOK_LANGUAGES:
            raise ConfigError(
                f"--lang {lang}: nltk's punkt models are missing, and syntok splits {', '.join(SYNTOK_LANGUAGES)} only",
                fix=error.problems[0].fix,
            ) from error
        return "syntok"
    return "punkt"


def load_splitter(settings: SplitSettings) -> SentenceSplitter:
    """Load the splitter of a language. Raises ConfigError if its package or its model is missing."""
    tokenizer = SyntokSentences() if settings.splitter == "syntok" else _load_punkt(settings.lang)
    return SentenceSplitter(tokenizer, keep_newlines=settings.keep_newlines)


class _NoModelsError(ConfigError):
    """nltk or its punkt models are not on this machine."""


def _load_punkt(lang: str) -> SpanTokenizer:
    if find_spec("nltk") is None:
        raise _NoModelsError(
            "--split-sentences needs the package nltk, or syntok, and neither can be imported",
            fix=f"pip install nltk, then {_DOWNLOAD}; or pip install syntok, which needs no download of models",
        )
    data = optional_package("nltk.data", needed_for="--split-sentences")
    punkt = optional_package("nltk.tokenize.punkt", needed_for="--split-sentences")
    if not hasattr(punkt, "PunktTokenizer"):
        raise ConfigError(
            "--split-sentences needs nltk 3.9 or newer: older versions read models that can run code",
            fix="pip install --upgrade nltk",
        )
    try:
        tokenizer: SpanTokenizer = punkt.PunktTokenizer(lang)
    except (LookupError, ValueError, OSError) as error:
        raise _missing_model(data, lang) from error
    return tokenizer


def _missing_model(data: Any, lang: str) -> ConfigError:
    try:
        folder = Path(data.find("tokenizers/punkt_tab/"))
    except LookupError:
        return _NoModelsError(
            f"--split-sentences needs nltk's punkt models, which are missing in {', '.join(data.path)}",
            fix=f"{_DOWNLOAD} (for another folder, set the variable NLTK_DATA); or pip install syntok, which needs no"
            " download of models",
        )
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    return ConfigError(
        f"--lang {lang}: {folder} has no model of this language",
        fix=f"use --lang {' or '.join(names)}" if names else f"install the models: {_DOWNLOAD}",
    )
