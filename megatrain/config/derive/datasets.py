"""Datasets of a run: their blend, and the split into training, validation and test data.

    "0.3 a 0.7 b"  ->  Blend(prefixes (a, b), weights (0.3, 0.7))
    "969, 30, 1"   ->  fractions 0.969, 0.03, 0.001  ->  cuts at 0, 0.969, 0.999, 1  ->  ranges of sequence numbers

The split cuts between sequences, not between documents: a document of several sequences may be cut. That of BERT and T5 cuts
between documents.

Source: Megatron-LM, core/datasets/utils.py and core/datasets/blended_megatron_dataset_config.py; rules in tests/golden.
"""

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
    """Several datasets, sampled as one."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    """Weights as given, not normalised. None: in proportion to their sizes."""


def parse_blend(words: Sequence[str], flag: str = "--data-path") -> Blend:
    """Parse words: pairs of weight and prefix, or prefixes alone.

    Raises:
        ConfigError: a weight is not a positive number.
    """
    words = [word.strip() for word in words]
    weights_or_none = [parse_weight(word) for word in words[::2]]
    if len(words) % 2 or None in weights_or_none:
        return Blend(tuple(words))
    weights = tuple(weight for weight in weights_or_none if weight is not None)
    problems = [
        Problem(
            f"{flag}: the weight of {prefix} is {weight:g}",
            "give every dataset a weight above 0, and leave out datasets that should not be read",
        )
        for weight, prefix in zip(weights, words[1::2], strict=True)
        if not 0 < weight < math.inf
    ]
    if not problems and not math.isfinite(sum(weights)):
        problems = [Problem(f"{flag}: the weights add up to infinity", "divide all weights by the largest")]
    if problems:
        raise ConfigError.of(problems)
    return Blend(tuple(words[1::2]), weights)


def parse_weight(word: str) -> float | None:
    """Return a word as a number; None: it is not a number."""
    try:
        return float(word)
    except ValueError:
        return None


SPLIT_NAMES: Final = ("train", "valid", "test")


def split_fractions(split: str) -> tuple[float, float, float]:
    """Return the numbers of a split string, divided by their sum. Missing numbers are 0; all but digits and dots are separators."""
    try:
        numbers = [float(word) for word in re.findall(r"[.0-9]+", split)]
    except ValueError as error:
        raise ConfigError(f"--split {split!r} has an invalid number: {error}", fix=_EXAMPLE) from error
    if len(numbers) > len(SPLIT_NAMES):
        raise ConfigError(
            f"--split {split!r} has {len(numbers)} numbers, and at most 3 are allowed", fix=_EXAMPLE
        )
    total = sum(numbers)
    if not total:
        raise ConfigError(f"--split {split!r} assigns no data to any split", fix=_EXAMPLE)
    if total == math.inf:
        raise ConfigError(f"--split {split!r} has a number that is too large", fix=_EXAMPLE)
    train, valid, test = (number / total for number in numbers + [0.0] * (len(SPLIT_NAMES) - len(numbers)))
    return train, valid, test


def split_problems(split: str) -> Sequence[Problem]:
    """Return what is wrong with a split string. Separators other than spaces, commas, semicolons, slashes and quotes are mistakes."""
    words = [word for word in re.split(r"[\s,;/'\"]+", split.strip()) if word]
    if not all(re.fullmatch(r"[0-9]+\.?[0-9]*|\.[0-9]+", word) for word in words):
        return [
            Problem(
                f"--split {split!r} has an entry that is not a number of 0 or more",
                "give up to three numbers for training, validation and test, such as --split 969,30,1",
            )
        ]
    try:
        split_fractions(split)
    except ConfigError as error:
        return error.problems
    return []


def split_ranges(split: str, num_sequences: int) -> tuple[range | None, range | None, range | None]:
    """Return the sequence numbers of train, valid and test. None: the fraction is 0. Rounding may leave a range empty."""
    fractions = split_fractions(split)
    cuts = [0.0, *itertools.accumulate(fractions)]
    # Megatron-LM uses Python's `round` (ties to even), which differs from C's.
    train, valid, test = (
        range(round(low * num_sequences), round(high * num_sequences)) if fraction else None
        for fraction, low, high in zip(fractions, cuts[:-1], cuts[1:], strict=True)
    )
    return train, valid, test


def require_sequences(
    split: str, num_sequences: Mapping[str, int], is_used: Sequence[bool], *, unit: str = "sequences"
) -> None:
    """Check that every split in use has a sequence of every dataset.

    Args:
        split: the split string.
        num_sequences: number of sequences of each dataset, by name.
        is_used: whether the run reads samples of train, valid and test.
        unit: what the numbers count.

    Raises:
        ConfigError: a split in use has no sequence of a dataset.
    """
    counts = {
        name: [len(part or ()) for part in split_ranges(split, number)]
        for name, number in num_sequences.items()
    }
    too_small = {
        name: found
        for name, found in counts.items()
        if any(used and not count for count, used in zip(found, is_used, strict=True))
    }
    if not too_small:
        return
    name, found = min(too_small.items(), key=lambda item: num_sequences[item[0]])
    described = ", ".join(f"{part} {count}" for part, count in zip(SPLIT_NAMES, found, strict=True))
    empty = [
        part for part, count, used in zip(SPLIT_NAMES, found, is_used, strict=True) if used and not count
    ]
    more = len(too_small) - 1
    others = f" ({more} other dataset{'s are' if more > 1 else ' is'} too small, too)" if more else ""
    proposal = working_split(found, is_used)
    raise ConfigError(
        f"--split {split!r} of the {num_sequences[name]} {unit} of {name} is {described}: "
        f"the run reads {' and '.join(empty)}, which {'has' if len(empty) == 1 else 'have'} none{others}",
        fix=f"use --split {proposal}, or read no samples there (--eval-iters 0)"
        if proposal
        else f"add data, as there are too few {unit}, or read no samples there (--eval-iters 0)",
    )


def working_split(counts: Sequence[int], is_used: Sequence[bool]) -> str | None:
    """Return a split string near `counts` that gives every split in use a sequence; None: there is none."""
    wanted = [max(count, int(used)) for count, used in zip(counts, is_used, strict=True)]
    num_sequences = sum(counts)
    if sum(is_used) > num_sequences:
        return None
    while sum(wanted) > num_sequences:
        spare = [count - used for count, used in zip(wanted, is_used, strict=True)]
        wanted[spare.index(max(spare))] -= 1
    if not sum(wanted):
        return None
    return ",".join(map(str, wanted))


_EXAMPLE: Final = "give up to three numbers for train, valid and test, such as --split 969,30,1"
