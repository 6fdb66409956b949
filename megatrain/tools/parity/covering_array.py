"""Covering arrays: few rows in which every pair of values of any two options meets once at least.

    options, which partial rows are allowed  ->  pairs that some row can hold  ->  rows, the fullest first

A row has a value of each option; a partial row has None for what is open. `is_allowed` says False to a partial row
only if no row that extends it is allowed, and decides for each row in full. Each row is built around the first pair
that is still to come, by giving one option after another the value with which most such pairs are met, in several
orders of the options; the best of these rows is taken. Nothing is drawn at random.

Source of the idea: Cohen, Dalal, Fredman, Patton, "The AETG system", IEEE TSE 23(7), 1997.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

Row = tuple[str, ...]
Partial = tuple[str | None, ...]
Pair = tuple[int, str, int, str]
"""Number of an option and its value, twice; the numbers increase."""

_NUM_ORDERS = 8


def pairs_of(row: Row) -> set[Pair]:
    """The pairs that meet in a row."""
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}


def possible_pairs(options: Sequence[Row], is_allowed: Callable[[Partial], bool]) -> list[Pair]:
    """All pairs that some allowed row holds, in the order of the options."""
    blank: Partial = (None,) * len(options)
    return [
        (i, first, j, second)
        for i, j in combinations(range(len(options)), 2)
        for first in options[i]
        for second in options[j]
        if completed(_put(_put(blank, i, first), j, second), options, is_allowed) is not None
    ]


def completed(partial: Partial, options: Sequence[Row], is_allowed: Callable[[Partial], bool]) -> Row | None:
    """The first allowed row that extends a partial one; None: there is none."""
    if not is_allowed(partial):
        return None
    if None not in partial:
        return tuple(value for value in partial if value is not None)
    place = partial.index(None)
    rows = (completed(_put(partial, place, value), options, is_allowed) for value in options[place])
    return next((row for row in rows if row is not None), None)


def covering_rows(
    options: Sequence[Row], is_allowed: Callable[[Partial], bool], most: int | None = None
) -> list[Row]:
    """Allowed rows in which all possible pairs meet, or the first of them. Equal arguments give equal rows."""
    missing = dict.fromkeys(possible_pairs(options, is_allowed))
    uses: Counter[tuple[int, str]] = Counter()
    rows: list[Row] = []
    while missing and (most is None or len(rows) < most):
        candidates = [
            _row_around(pair, order, options, is_allowed, missing, uses)
            for pair, order in _starts(missing, options)
        ]
        best = max(candidates, key=lambda row: sum(pair in missing for pair in pairs_of(row)))
        for pair in pairs_of(best):
            missing.pop(pair, None)
        uses.update(enumerate(best))
        rows.append(best)
    return rows


def _starts(missing: dict[Pair, None], options: Sequence[Row]) -> Iterator[tuple[Pair, list[int]]]:
    """Pairs to build rows around, spread over those that are missing, each with another order of the options."""
    pairs = list(missing)
    by_size = sorted(range(len(options)), key=lambda place: -len(options[place]))
    for number in range(_NUM_ORDERS):
        turned = by_size[number % len(by_size) :] + by_size[: number % len(by_size)]
        yield pairs[number * len(pairs) // _NUM_ORDERS], turned


def _row_around(
    pair: Pair,
    order: Sequence[int],
    options: Sequence[Row],
    is_allowed: Callable[[Partial], bool],
    missing: dict[Pair, None],
    uses: Counter[tuple[int, str]],
) -> Row:
    i, first, j, second = pair
    partial = _put(_put((None,) * len(options), i, first), j, second)
    for place in order:
        if partial[place] is not None:
            continue
        ranked = sorted(
            options[place],
            key=lambda value, at=place, row=partial: (-_gain(row, at, value, missing), uses[at, value]),  # type: ignore[misc]
        )
        partial = next(
            wider
            for wider in (_put(partial, place, value) for value in ranked)
            if completed(wider, options, is_allowed) is not None
        )
    return tuple(value for value in partial if value is not None)


def _gain(partial: Partial, place: int, value: str, missing: dict[Pair, None]) -> int:
    """Missing pairs that a value meets in what is there of a row."""
    gain = 0
    for other, known in enumerate(partial):
        if known is not None:
            pair = (other, known, place, value) if other < place else (place, value, other, known)
            gain += pair in missing
    return gain


def _put(partial: Partial, place: int, value: str) -> Partial:
    return (*partial[:place], value, *partial[place + 1 :])
