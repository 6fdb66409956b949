"""What a list of words such as `0.3 a 0.7 b` says about the datasets that are read as one.

Source: Megatron-LM, core/datasets/utils.py; rules in tests/golden.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
    firsts = [number_of(word) for word in words[::2]]
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


def number_of(word: str) -> float | None:
    """The weight that a word may be; None: it is none."""
    try:
        return float(word)
    except ValueError:
        return None
