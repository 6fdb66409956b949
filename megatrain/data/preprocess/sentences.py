r"""Split documents into sentences with the punkt models of nltk.

"One. Two.\nThree."  ->  "One."  "Two."  "Three."          keep_newlines:  "One. "  "Two.\n"  "Three."
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megatrain.config.errors import ConfigError
from megatrain.data.files import optional_package

MAX_CHARS: Final = 1_000_000
"""Longer texts are first cut into parts of this many characters, as in Megatron-LM."""


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    """Settings of sentence splitting."""

    lang: str
    """Language of the model, named as in nltk: english, german, ..."""
    keep_newlines: bool
    """Keep the white space between two sentences at the end of the first one."""


class SentenceSplitter:
    """Splits texts with a punkt tokenizer: any object with `span_tokenize`."""

    def __init__(self, punkt: Any, *, keep_newlines: bool) -> None:
        self._punkt = punkt
        self._keep_newlines = keep_newlines

    def __call__(self, text: str) -> list[str]:
        """Split a text into sentences. White space at the end of the text is dropped."""
        return [
            sentence
            for start in range(0, len(text), MAX_CHARS)
            for sentence in self._sentences(text[start : start + MAX_CHARS])
        ]

    def _sentences(self, text: str) -> list[str]:
        spans = list(self._punkt.span_tokenize(text))
        ends = [end for _, end in spans]
        if self._keep_newlines:
            ends[:-1] = [start for start, _ in spans[1:]]
        return [text[start:end] for (start, _), end in zip(spans, ends, strict=True)]


def load_splitter(settings: SplitSettings) -> SentenceSplitter:
    """Load the splitter of a language. Raises ConfigError if nltk or its model of the language is missing."""
    data = optional_package("nltk.data", needed_for="--split-sentences")
    punkt = optional_package("nltk.tokenize.punkt", needed_for="--split-sentences")
    if not hasattr(punkt, "PunktTokenizer"):
        raise ConfigError(
            "--split-sentences needs nltk 3.9 or newer: older versions read models that can run code",
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
            f"--split-sentences needs nltk's punkt models, which are missing in {', '.join(data.path)}",
            fix="python -m nltk.downloader punkt_tab (for another folder, set the variable NLTK_DATA)",
        )
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    return ConfigError(
        f"--lang {lang}: {folder} has no model of this language",
        fix=f"use --lang {' or '.join(names)}"
        if names
        else "install the models: python -m nltk.downloader punkt_tab",
    )
