"""Covering arrays: few rows such that every pair of values of any two options occurs together in at least one row.

    options, which partial rows are allowed  ->  pairs that some row can hold  ->  rows, the fullest first

A row has one value per option; a partial row has None for each open option. `is_allowed` returns False for a partial row
only if no allowed row extends it, and decides exactly for a full row. Each row starts from the first pair that is not
covered yet; then one option after another gets the value that covers most missing pairs, in several orders of the
options, and the best of these rows is kept. Nothing is random.

Source of the idea: Cohen, Dalal, Fredman, Patton, "The AETG system", IEEE TSE 23(7), 1997.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product

Row = tuple[str, ...]
Partial = tuple[str | None, ...]
Pair = tuple[int, str, int, str]
"""(option index, value, option index, value), with increasing option indices."""

_NUM_ORDERS = 8


def pairs_of(row: Row) -> set[Pair]:
    """Return the pairs of values that occur together in a row."""
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}


def possible_pairs(options: Sequence[Row], is_allowed: Callable[[Partial], bool]) -> list[Pair]:
    """Return all pairs that occur together in some allowed row, in the order of the options."""
    blank: Partial = (None,) * len(options)
    pairs: list[Pair] = []
    row: Row | None = None
    for i, j in combinations(range(len(options)), 2):
        for first, second in product(options[i], options[j]):
            found = completed(_put(_put(blank, i, first), j, second), options, is_allowed, like=row)
            if found is not None:
                pairs.append((i, first, j, second))
                row = found
    return pairs


def completed(
    partial: Partial, options: Sequence[Row], is_allowed: Callable[[Partial], bool], like: Row | None = None
) -> Row | None:
    """Return an allowed row that extends a partial row, or None.

    Args:
        like: values that are tried first: for all open options at once, then one by one; the first ones by default.
    """
    like = tuple(values[0] for values in options) if like is None else like
    row = tuple(new if known is None else known for known, new in zip(partial, like, strict=True))
    if is_allowed(row):
        return row
    return _searched(partial, options, is_allowed, like) if is_allowed(partial) else None


def _searched(
    partial: Partial, options: Sequence[Row], is_allowed: Callable[[Partial], bool], like: Row
) -> Row | None:
    """Return an allowed row that extends an allowed partial row, or None: depth-first, with the values of `like` first.

    Bisection finds how many open options `like` can fill.
    """
    places = [place for place, known in enumerate(partial) if known is None]

    def filled(number: int) -> Partial:
        row = list(partial)
        for place in places[:number]:
            row[place] = like[place]
        return tuple(row)

    numbers = range(len(places) + 1)
    num_fitting = bisect_left(numbers, True, lo=1, key=lambda number: not is_allowed(filled(number))) - 1
    if num_fitting == len(places):
        return tuple(value for value in filled(num_fitting) if value is not None)
    for number in range(num_fitting, -1, -1):
        place, known = places[number], filled(number)
        for value in options[place]:
            if value != like[place] and is_allowed(wider := _put(known, place, value)):
                row = _searched(wider, options, is_allowed, like)
                if row is not None:
                    return row
    return None


def covering_rows(
    options: Sequence[Row], is_allowed: Callable[[Partial], bool], most: int | None = None
) -> list[Row]:
    """Return allowed rows that cover all possible pairs, or the first `most` of them. The result is deterministic."""
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
    """Choose missing pairs to start rows from, each with another order of the options."""
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
    row = completed(partial, options, is_allowed)
    for place in order:
        if partial[place] is not None:
            continue
        ranked = sorted(
            options[place],
            key=lambda value, at=place, row=partial: (-_gain(row, at, value, missing), uses[at, value]),  # type: ignore[misc]
        )
        assert row is not None, "the pair is possible"
        rows = (
            # `row` extends `partial` too: with its value nothing is searched.
            row if row[place] == value else completed(_put(partial, place, value), options, is_allowed, row)
            for value in ranked
        )
        row = next(found for found in rows if found is not None)
        partial = _put(partial, place, row[place])
    assert row is not None
    return row


def _gain(partial: Partial, place: int, value: str, missing: dict[Pair, None]) -> int:
    """Count the missing pairs that a value covers together with the values already in the row."""
    gain = 0
    for other, known in enumerate(partial):
        if known is not None:
            pair = (other, known, place, value) if other < place else (place, value, other, known)
            gain += pair in missing
    return gain


def _put(partial: Partial, place: int, value: str) -> Partial:
    return (*partial[:place], value, *partial[place + 1 :])
