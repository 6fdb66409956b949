"""Split a command line into flags and their words, without their meaning.

--num_layers 12 --recompute-modules moe_act mlp --lr=-1e-4
  ->  ("--num_layers", ("12",))   ("--recompute-modules", ("moe_act", "mlp"))   ("--lr", ("-1e-4",))
"""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from megatrain.config.schema.tree import Origin

_NEGATIVE_NUMBER: Final = re.compile(r"-\.?[0-9]")


@dataclass(frozen=True)
class FlagWords:
    """A flag and the words after it, from the command line or from a line of a YAML file."""

    typed: str
    """The flag as typed."""
    words: tuple[str, ...] = ()
    place: str = ""
    """`file:line` in a YAML file; empty on the command line."""
    written: str = ""
    """`name: value` in the file; the name need not be that of the flag."""

    @property
    def flag(self) -> str:
        """The flag with `-` for `_`: Megatron-LM accepts both."""
        return self.typed.replace("_", "-")

    @property
    def name(self) -> str:
        """The flag as typed, or the name in the file with its place."""
        return f"{self.place}: {self.written.partition(': ')[0]}" if self.place else self.flag

    @property
    def origin(self) -> Origin:
        return Origin("yaml", self.place) if self.place else Origin("flag", self.flag)

    def __str__(self) -> str:
        if self.place:
            return f"{self.place}: {textwrap.shorten(self.written, 200)}"
        if not self.words:
            return self.flag
        return f"{self.flag} {textwrap.shorten(' '.join(self.words), 200) or repr('')}"


def split_flags(argv: Sequence[str]) -> tuple[list[FlagWords], list[str]]:
    """Return the flags in order, and the words before the first one."""
    found: list[tuple[str, list[str]]] = []
    stray: list[str] = []
    for word in argv:
        if is_flag(word):
            name, sign, value = word.partition("=")
            found.append((name, [value] if sign else []))
        elif found:
            found[-1][1].append(word)
        else:
            stray.append(word)
    return [FlagWords(name, tuple(words)) for name, words in found], stray


def is_flag(word: str) -> bool:
    """Return whether a word starts a flag: `-1e-4` and `-` are values."""
    return len(word) > 1 and word.startswith("-") and not _NEGATIVE_NUMBER.match(word)


def words_of(flag: str, *values: str) -> list[str]:
    """Return the words that give a flag these values; a value that would start a flag, such as `-M*`, follows `=`."""
    if len(values) == 1 and is_flag(values[0]):
        return [f"{flag}={values[0]}"]
    return [flag, *values]


def list_words(words: Sequence[str]) -> tuple[str, ...]:
    """Return the entries of a list: `a b`, `[a b]` and `[a, b]` are the same, in one word or several."""
    text = " ".join(words)
    if text.startswith("[") and text.endswith("]"):
        return tuple(text[1:-1].replace(",", " ").split())
    return tuple(words)
