"""Decorators with which the files of `subjects/` register their functions.

    @derives("model.kv_channels")     a value that the user left open, or a field of `Derived`, and its reason
    @overrides("model.kv_channels")   in place of a given value that has no meaning here, as in Megatron-LM; None: it stays
    @rule                             problems; each names the flag, its value and a value that works
    @note                             lines of the plan
    @unproven                         lines of the plan: the result is not the same under every layout, or not proven to be

A function may compute freely: if a value that it reads is open, it waits; if one is missing or wrong, it stops, since that problem is
reported elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, TypeVar

from megatrain.config.errors import Problem
from megatrain.config.plan import DerivedValue, Draft

Problems = Iterator[Problem]
Notes = Iterator[str]
T = TypeVar("T")


@dataclass(frozen=True)
class Registered(Generic[T]):
    """A function of a subject."""

    function: Callable[[Draft], T]
    path: str = ""
    """The value that it derives."""

    def __call__(self, draft: Draft) -> T:
        return self.function(draft)

    @property
    def name(self) -> str:
        return self.function.__name__


class Derivation(Registered[DerivedValue]):
    """See `derives`."""


class Override(Registered[DerivedValue | None]):
    """See `overrides`."""


class Rule(Registered[Problems]):
    """See `rule`."""


class Note(Registered[Notes]):
    """See `note`."""


class Unproven(Registered[Notes]):
    """See `unproven`."""


rule, note, unproven = Rule, Note, Unproven
AnyRegistered = TypeVar("AnyRegistered", bound=Registered[Any])


def derives(path: str) -> Callable[[Callable[[Draft], DerivedValue]], Derivation]:
    """Register the derivation of a value."""
    return lambda function: Derivation(function, path)


def overrides(path: str) -> Callable[[Callable[[Draft], DerivedValue | None]], Override]:
    """Register the override of a given value."""
    return lambda function: Override(function, path)


def registered(kind: type[AnyRegistered], subjects: Iterable[ModuleType]) -> tuple[AnyRegistered, ...]:
    """Return what the subjects register of a kind, in the order of the files."""
    found = (value for subject in subjects for value in vars(subject).values())
    flat = (one for value in found for one in (value if isinstance(value, tuple) else (value,)))
    return tuple(dict.fromkeys(one for one in flat if isinstance(one, kind)))
