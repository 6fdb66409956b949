"""Versions of libraries in their order."""

import re
import sys


def to_sequence_order(version: str) -> tuple[int, ...]:
    """Versions such as 4.0.0b36 in their order: a beta comes before its release."""
    release, _, beta = version.partition("b")
    numbers = [int(number) for number in re.findall(r"\d+", release)[:3]]
    found = re.match(r"\d+", beta)
    return (*numbers, *[0] * (3 - len(numbers)), int(found[0]) if found else sys.maxsize)
