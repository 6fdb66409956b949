"""Fixes that are tried before they are printed.

    rule ──> candidates, best first ──> resolve once more with each ──> the first that leaves nothing to report

A fix that follows from the numbers of one rule often breaks another: 6 heads and 3 query groups on 2 ranks need 6 groups,
not the next multiple of 2. Of several fixes, that of the setting which the user typed comes first: it is what just changed.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

from megatrain.config.derive.vision import length_setting, sample_length, text_length
from megatrain.config.plan import Draft
from megatrain.config.schema.tree import flag_of, settings_by_path

Change = Mapping[str, Any]
"""New values by path."""

_AXES: Final = tuple(
    f"parallel.{axis}_parallel_size" for axis in ("tensor_model", "context", "pipeline_model")
)
_MICRO: Final = "training.micro_batch_size"
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
    own fix follows. Changes of what the command line gives come first, then those of what a YAML file gives.
    """
    found = [one for changes in alternatives if (one := _best(draft, changes)) is not None]
    assert found, "a fix needs a candidate"
    least = min(count for count, _ in found)
    chosen = [change for count, change in found if count == least]
    chosen.sort(key=lambda change: min(distance(draft, path) for path in change))
    return f"use {', or '.join(map(words, chosen))}"


def distance(draft: Draft, path: str) -> int:
    """Return how far from the user's hands a value is: 0 on the command line, 1 in a YAML file, 2 elsewhere."""
    origin = draft.origins.get(path)
    return {"flag": 0, "yaml": 1}.get(origin.kind, 2) if origin else 2


def located(draft: Draft, path: str) -> str:
    """Return a flag, and its place if a YAML file has it."""
    origin = draft.origins[path]
    return flag_of(path) + (f" ({origin.detail})" if origin.kind == "yaml" else "")


def words(change: Change) -> str:
    """Return the flags of a change."""
    return " ".join(_flag(path, value) for path, value in change.items())


def _flag(path: str, value: object) -> str:
    if isinstance(value, bool):
        setting = settings_by_path()[path]
        return setting.flag if value else setting.opposite_flag
    return f"{flag_of(path)} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


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
    """Yield smaller sizes of an axis that divide the number of ranks, the largest first; then with smaller micro-batches.

    Fewer ranks for each replica are more replicas, among which the same global batch is divided.
    """
    world, batch = draft.derived.world_size, draft.config.raw("training.global_batch_size")
    sizes = list(divisors(path, world, draft.config.get(path) - 1))
    yield from sizes
    for size in sizes if isinstance(batch, int) else ():
        replicas = world // math.prod({**{one: draft.config.get(one) for one in _AXES}, **size}.values())
        micro_batches = divisors(_MICRO, batch // max(replicas, 1), draft.config.get(_MICRO) - 1)
        yield from ({**size, **micro} for micro in micro_batches)


def lengths(draft: Draft, factor: int) -> Iterator[Change]:
    """Yield multiples of `factor` near --seq-length; above --max-position-embeddings only if there is none below."""
    config = draft.config
    path, length = length_setting(config), sample_length(config)
    images = length - text_length(config)
    yield from ({path: one[path] - images} for one in islice(multiples(path, length, factor), 4))
    longest = config.model.max_position_embeddings
    if not images and longest is not None and longest >= factor:
        yield {path: longest // factor * factor}
