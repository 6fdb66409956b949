"""The parts of the table of parity features: `Option`, `Feature`, `RefusedPair`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from megatrain.config.plan import Draft, Plan

PlanOrDraft = Draft | Plan

REPLICAS: Final = ("dp", "cp")
"""Features that create replicas: a run that uses neither has one replica only."""


@dataclass(frozen=True)
class Feature:
    """One value of an option."""

    name: str
    flags: str
    """Flags that select it; empty: selected by giving none."""
    is_used: Callable[[PlanOrDraft], bool]
    needs: tuple[str, ...] = ()
    """Required features, at least one; without them this one has no effect, and no row covers it."""
    rows: Mapping[str, str] = field(default_factory=dict)
    """Row words of parity and the flags of each; empty: the feature's name and `flags`."""

    def words(self) -> Mapping[str, str]:
        """Return the row words of this feature, with the flags of each."""
        return self.rows or {self.name: self.flags}


@dataclass(frozen=True)
class Option:
    """A choice that every run makes, with its features as values. A run may use several of them."""

    name: str
    settings: tuple[str, ...]
    """Paths of the settings that decide it."""
    features: tuple[Feature, ...]
    is_layout: bool = False
    """True: decides how the work is split, not the result; the one-process reference of parity omits it."""

    def words(self) -> dict[str, str]:
        """Return the row words of all features, with the flags of each. The first word is the default."""
        return {word: flags for feature in self.features for word, flags in feature.words().items()}


@dataclass(frozen=True)
class RefusedPair:
    """Two features that are not supported together."""

    pair: tuple[str, str]
    reason: str
    fix: str


def option_sizes(flag: str, word: str, *numbers: int) -> dict[str, str]:
    """Return row words such as `tp2`, each with the flag and its number. Without a flag the size is derived."""
    return {f"{word}{size}": f"{flag} {size}".strip() if flag else "" for size in numbers}
