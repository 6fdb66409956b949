"""Fixes that are tried before they are printed.

    rule ──> candidates, best first ──> resolve once more with each ──> the first that leaves nothing to report

A fix that follows from the numbers of one rule often breaks another: 6 heads and 3 query groups on 2 ranks need 6 groups,
not the next multiple of 2.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

from megatrain.config.derive.vision import length_setting, sample_length, text_length
from megatrain.config.plan import Draft
from megatrain.config.schema.tree import flag_of

Change = Mapping[str, Any]
"""New values by path."""

_MOST: Final = 24
"""Candidates that are tried; each costs a few milliseconds."""


def best(draft: Draft, changes: Iterable[Change]) -> Change:
    """Return the first of some changes that breaks no rule, or the one that breaks fewest."""
    found = _best(draft, changes)
    assert found is not None, "a fix needs a candidate"
    return found[1]


def use(draft: Draft, *alternatives: Iterable[Change]) -> str:
    """Return `use --one 2, or --other 3`, with the first change of each alternative that breaks no rule.

    Alternatives without such a change are left out. If there is none at all, the change that breaks fewest rules is named: its
    own fix follows.
    """
    found = [one for changes in alternatives if (one := _best(draft, changes)) is not None]
    assert found, "a fix needs a candidate"
    least = min(count for count, _ in found)
    return f"use {', or '.join(words(change) for count, change in found if count == least)}"


def words(change: Change) -> str:
    """Return the flags of a change."""
    return " ".join(
        flag_of(path) if value is True else f"{flag_of(path)} {value}" for path, value in change.items()
    )


def _best(draft: Draft, changes: Iterable[Change]) -> tuple[int, Change] | None:
    found: tuple[int, Change] | None = None
    for change in islice(changes, _MOST):
        count = draft.breaks(change)
        if found is None or count < found[0]:
            found = count, change
        if count == 0:
            break
    return found


def multiples(path: str, number: int, factor: int) -> Iterator[Change]:
    """Yield multiples of `factor` from `number` on."""
    first = -(-number // factor)
    return ({path: factor * (first + step)} for step in range(_MOST))


def divisors(path: str, number: int, limit: int) -> Iterator[Change]:
    """Yield the divisors of `number` up to `limit`, the largest first."""
    largest = min(number, limit, 2**16)  # bounds the search
    return ({path: size} for size in range(largest, 0, -1) if number % size == 0)


def fewer_ranks(draft: Draft, path: str) -> Iterator[Change]:
    """Yield smaller sizes of an axis that divide the number of ranks, the largest first."""
    return divisors(path, draft.derived.world_size, draft.config.get(path) - 1)


def lengths(draft: Draft, factor: int) -> Iterator[Change]:
    """Yield multiples of `factor` near --seq-length; above --max-position-embeddings only if there is none below."""
    config = draft.config
    path, length = length_setting(config), sample_length(config)
    images = length - text_length(config)
    yield from ({path: one[path] - images} for one in islice(multiples(path, length, factor), 4))
    longest = config.model.max_position_embeddings
    if not images and longest is not None and longest >= factor:
        yield {path: longest // factor * factor}
