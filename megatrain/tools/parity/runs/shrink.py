"""Shrink a failing case to a minimal one: fewer words, smaller sizes, then fewer flags.

words ──> the fewest that still fail ──> smaller sizes ──> Case ──> the fewest flags that still fail
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from megatrain.tools.parity.runs.case import Case, size_of
from megatrain.tools.parity.runs.options import OPTION_OF, OPTIONS, SIZES

T = TypeVar("T")


def smallest(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """Remove items, many at once at first, while `fails` holds; no single item of the rest can be removed."""
    rest, size = list(items), max(1, len(items) // 2)
    while True:
        for start in range(0, len(rest), size):
            fewer = rest[:start] + rest[start + size :]
            if fails(fewer):
                rest = fewer
                break
        else:
            if size == 1:
                return rest
            size //= 2


def shrunk_words(words: Sequence[str], data: Path, fails: Callable[[Case], bool]) -> tuple[str, ...]:
    """Return the fewest words, with the smallest sizes, whose case still fails."""

    def of_words_fails(some: Sequence[str]) -> bool:
        return fails(Case.of(some, data))

    rest = smallest(words, of_words_fails)
    for place, word in enumerate(rest):
        option = OPTION_OF[word]
        sizes = (
            [other for other in OPTIONS[option] if 1 < size_of(other) < size_of(word)]
            if option in SIZES
            else []
        )
        for other in sorted(sizes, key=size_of):
            if of_words_fails([*rest[:place], other, *rest[place + 1 :]]):
                rest[place] = other
                break
    return tuple(rest)


def shrunk(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Return the case with the fewest flags that still fails."""
    layout = smallest(case.layout, lambda flags: fails(replace(case, layout=tuple(flags))))
    case = replace(case, layout=tuple(layout))
    shared = smallest(case.shared, lambda flags: fails(replace(case, shared=tuple(flags))))
    return replace(case, shared=tuple(shared))
