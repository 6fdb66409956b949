"""Words of a command in which some parts stay as shell text, such as `${SLURM_NODEID}`."""

import re
import shlex
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A part of a word."""

    text: str
    is_open: bool = False
    """True for shell text that is left as it is."""
    name: str = ""
    """The variable of the script whose value is open."""


Word = tuple[Part, ...]


def plain(word: Word) -> str:
    """Return the characters of a word; open parts as shell text."""
    return "".join(part.text for part in word)


def quoted(word: Word) -> str:
    """Return a word as a shell reads it back; control characters are escaped, so that a terminal does not obey them."""
    text = plain(word)
    if not any(part.is_open for part in word):
        if text.isprintable():
            return shlex.quote(text)
        return "$'" + repr(text)[1:-1].replace("\\'", "'").replace("'", "\\'") + "'"
    kept = "".join(part.text if part.is_open else re.sub(r'([$`"\\])', r"\\\1", part.text) for part in word)
    return f'"{printable(kept)}"'


def printable(text: str) -> str:
    """Return a text in which control characters are escaped."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def without_start(word: Word, length: int) -> Word:
    """Return a word without its first characters."""
    kept = []
    for part in word:
        if length < len(part.text) or not part.text:
            kept.append(Part(part.text[length:], part.is_open))
        length = max(0, length - len(part.text))
    return tuple(kept)


def without_quotes(text: str) -> str:
    """Return shell text in which variables have no quotes, so that it can stand in quotes."""
    return re.sub(r'"(\$\{[^"]*\})"', r"\1", text)
