r"""Cuts documents into sentences, with the punkt models of nltk.

"One. Two.\nThree."  ->  "One."  "Two."  "Three."          keep_newlines:  "One. "  "Two.\n"  "Three."
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megatrain.config.errors import ConfigError
from megatrain.data.files import optional_package

PIECE_CHARS: Final = 1_000_000
"""Longer texts are cut into pieces of this many characters first, as Megatron-LM does."""


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    """How to cut."""

    lang: str
    """Language of the model, by nltk's name: english, german, ..."""
    keep_newlines: bool
    """The white space between two sentences belongs to the first one, instead of to none."""


class SentenceSplitter:
    """Cuts with a punkt tokenizer: anything that has `span_tokenize`."""

    def __init__(self, punkt: Any, *, keep_newlines: bool) -> None:
        self._punkt = punkt
        self._keep_newlines = keep_newlines

    def __call__(self, text: str) -> list[str]:
        """The sentences of a text. White space at its end belongs to none."""
        return [
            sentence
            for start in range(0, len(text), PIECE_CHARS)
            for sentence in self._sentences(text[start : start + PIECE_CHARS])
        ]

    def _sentences(self, piece: str) -> list[str]:
        spans = list(self._punkt.span_tokenize(piece))
        ends = [end for _, end in spans]
        if self._keep_newlines:
            ends[:-1] = [start for start, _ in spans[1:]]
        return [piece[start:end] for (start, _), end in zip(spans, ends, strict=True)]


def load_splitter(settings: SplitSettings) -> SentenceSplitter:
    """The splitter of a language. Raises ConfigError if nltk or its model of the language is not there."""
    data = optional_package("nltk.data", needed_for="--split-sentences")
    punkt = optional_package("nltk.tokenize.punkt", needed_for="--split-sentences")
    if not hasattr(punkt, "PunktTokenizer"):
        raise ConfigError(
            "--split-sentences needs nltk 3.9 or newer: older ones read models that can run code",
            fix="pip install --upgrade nltk",
        )
    try:
        tokenizer = punkt.PunktTokenizer(settings.lang)
    except (LookupError, ValueError, OSError) as error:
        raise _missing_model(data, settings.lang) from error
    return SentenceSplitter(tokenizer, keep_newlines=settings.keep_newlines)


def _missing_model(data: Any, lang: str) -> ConfigError:
    try:
        folder = Path(data.find("tokenizers/punkt_tab/"))
    except LookupError:
        return ConfigError(
            f"--split-sentences needs nltk's punkt models, and there are none in {', '.join(data.path)}",
            fix="python -m nltk.downloader punkt_tab (elsewhere, say where with the variable NLTK_DATA)",
        )
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    return ConfigError(
        f"--lang {lang}: {folder} has no such model", fix=f"use {' or '.join(names) or 'other data'}"
    )
