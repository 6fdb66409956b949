"""Datasets of a run: blends of them, and the split into training, validation and test data."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from megatrain.config.errors import ConfigError, Problem


@dataclass(frozen=True)
class Blend:
    """Datasets that are read as one."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    """As given, not normalised. None: by size."""


def parse_blend(words: Sequence[str], flag: str = "--data-path") -> Blend:
    """The blend that a list of words describes: pairs of weight and prefix, or prefixes alone.

    Raises:
        ConfigError: a weight is no positive number.
    """
    words = [word.strip() for word in words]
    firsts = [parse_weight(word) for word in words[::2]]
    if len(words) % 2 or None in firsts:
        return Blend(tuple(words))
    weights = tuple(weight for weight in firsts if weight is not None)
    problems = [
        Problem(
            f"{flag}: the weight of {prefix} is {weight:g}",
            "give every dataset a weight above 0, and leave out those that should not be read",
        )
        for weight, prefix in zip(weights, words[1::2], strict=True)
        if not 0 < weight < math.inf
    ]
    if not problems and not math.isfinite(sum(weights)):
        problems = [Problem(f"{flag}: the weights add up to infinity", "divide them by their largest")]
    if problems:
        raise ConfigError.of(problems)
    return Blend(tuple(words[1::2]), weights)


def parse_weight(word: str) -> float | None:
    """The weight that a word may be; None: it is none."""
    try:
        return float(word)
    except ValueError:
        return None


SPLIT_NAMES: Final = ("train", "valid", "test")


def split_fractions(split: str) -> tuple[float, float, float]:
    """The numbers of a split string over their sum. Missing ones are 0; all but digits and dots separates them."""
    try:
        numbers = [float(word) for word in re.findall(r"[.0-9]+", split)]
    except ValueError as error:
        raise ConfigError(f"--split {split!r} holds a number that is none: {error}", fix=_EXAMPLE) from error
    if len(numbers) > len(SPLIT_NAMES):
        raise ConfigError(
            f"--split {split!r} has {len(numbers)} numbers, and at most 3 have a meaning", fix=_EXAMPLE
        )
    total = sum(numbers)
    if not total:
        raise ConfigError(f"--split {split!r} gives no data to any split", fix=_EXAMPLE)
    if total == math.inf:
        raise ConfigError(f"--split {split!r} holds too large a number", fix=_EXAMPLE)
    train, valid, test = (number / total for number in numbers + [0.0] * (len(SPLIT_NAMES) - len(numbers)))
    return train, valid, test


def split_ranges(split: str, num_sequences: int) -> tuple[range | None, range | None, range | None]:
    """The sequence numbers of train, valid and test. None: its share is 0. A range may be empty by rounding."""
    shares = split_fractions(split)
    borders = [0.0, *itertools.accumulate(shares)]
    # Python's round, ties to even, is the rule; it is not numpy's or C's.
    train, valid, test = (
        range(round(low * num_sequences), round(high * num_sequences)) if share else None
        for share, low, high in zip(shares, borders[:-1], borders[1:], strict=True)
    )
    return train, valid, test


def require_sequences(split: str, num_sequences: Mapping[str, int], is_asked: Sequence[bool]) -> None:
    """Every split that samples are asked of holds a sequence of every dataset.

    Args:
        split: the split string.
        num_sequences: of each dataset, by name.
        is_asked: whether samples are asked of train, valid and test.
    """
    counts = {
        name: [len(part or ()) for part in split_ranges(split, number)]
        for name, number in num_sequences.items()
    }
    lacking = {
        name: found
        for name, found in counts.items()
        if any(asked and not count for count, asked in zip(found, is_asked, strict=True))
    }
    if not lacking:
        return
    name, found = min(lacking.items(), key=lambda item: num_sequences[item[0]])
    described = ", ".join(f"{part} {count}" for part, count in zip(SPLIT_NAMES, found, strict=True))
    empty = [
        part for part, count, asked in zip(SPLIT_NAMES, found, is_asked, strict=True) if asked and not count
    ]
    others = f" ({len(lacking) - 1} other datasets are too small too)" if len(lacking) > 1 else ""
    proposal = working_split(found, is_asked)
    raise ConfigError(
        f"--split {split!r} of the {num_sequences[name]} sequences of {name} is {described}: "
        f"samples are asked of {' and '.join(empty)}, which has none{others}",
        fix=f"--split {proposal}, or ask for no samples there (--eval-iters 0)"
        if proposal
        else "the data has too few sequences: add data, or ask for no samples there (--eval-iters 0)",
    )


def working_split(counts: Sequence[int], is_asked: Sequence[bool]) -> str | None:
    """A split string near `counts` in which every split that is asked for has a sequence, if there is one."""
    wanted = [max(count, int(asked)) for count, asked in zip(counts, is_asked, strict=True)]
    num_sequences = sum(counts)
    if sum(is_asked) > num_sequences:
        return None
    while sum(wanted) > num_sequences:
        spare = [count - asked for count, asked in zip(wanted, is_asked, strict=True)]
        wanted[spare.index(max(spare))] -= 1
    if not sum(wanted):
        return None
    return ",".join(map(str, wanted))


_EXAMPLE: Final = "give up to three numbers for train, valid and test, such as 969,30,1"
