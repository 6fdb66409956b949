"""Decorators with which the files of `subjects/` register their functions.

    @derives("model.kv_channels")     a value that the user left open, or a field of `Derived`, and its reason
    @overrides("model.kv_channels")   in place of a given value that has no meaning here, as in Megatron-LM; None: it stays
    @rule                             problems; each names the flag, its value and a value that works
    @note("cost")                     lines of the plan, with what they change (`plan_note.py`)
    @unproven("result")               lines of the plan: the result is not the same under every layout, or ("nothing") not proven to be

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
from megatrain.config.plan_note import Grade, PlanNote, graded

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


@dataclass(frozen=True)
class Note(Registered[Notes]):
    """See `note`."""

    grade: Grade = "nothing"
    """The grade of lines without one of their own."""

    def __call__(self, draft: Draft) -> Iterator[PlanNote]:
        return (graded(text, self.grade) for text in self.function(draft))


class Unproven(Note):
    """See `unproven`."""


rule = Rule
AnyRegistered = TypeVar("AnyRegistered", bound=Registered[Any])


def note(grade: Grade) -> Callable[[Callable[[Draft], Notes]], Note]:
    """Register lines of the plan, and what they change."""
    return lambda function: Note(function, grade=grade)


def unproven(grade: Grade) -> Callable[[Callable[[Draft], Notes]], Unproven]:
    """Register lines on results that are not proven to be equal under every layout."""
    return lambda function: Unproven(function, grade=grade)


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
    return tuple(dict.fromkeys(one for one in flat if type(one) is kind))
