"""What the table of features (features.py) is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megatrain.config.plan import Draft, Plan

Decided = Draft | Plan


@dataclass(frozen=True)
class Feature:
    """One value of an option."""

    name: str
    flags: str
    """How a user asks for it; none: by giving nothing."""
    is_used: Callable[[Decided], bool]
    needs: tuple[str, ...] = ()
    """The features without any of which it has no effect, so that no row proves it."""
    rows: Mapping[str, str] = field(default_factory=dict)
    """What parity tries it with: a word for the row, and its flags. Left out: its name and `flags`."""

    def words(self) -> Mapping[str, str]:
        """The words that stand for it in parity's rows, and the flags of each."""
        return self.rows or {self.name: self.flags}


@dataclass(frozen=True)
class Option:
    """What is one way or another in each run: one of its features, or several."""

    name: str
    settings: tuple[str, ...]
    """Paths that decide it."""
    features: tuple[Feature, ...]
    is_layout: bool = False
    """Whether it says how work is done, not what is computed: parity's one process does without it."""

    def words(self) -> dict[str, str]:
        """The words of all features, and the flags of each. The first is what holds where nothing is said."""
        return {word: flags for feature in self.features for word, flags in feature.words().items()}


@dataclass(frozen=True)
class Refused:
    """Two features that do not go together (yet)."""

    pair: tuple[str, str]
    why: str
    fix: str


def sizes(flag: str, word: str, *numbers: int) -> dict[str, str]:
    """Words such as `tp2`, each with the flag and its number; a size without a flag follows from others."""
    return {f"{word}{size}": f"{flag} {size}".strip() if flag else "" for size in numbers}
