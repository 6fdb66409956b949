"""Order of library versions."""

import re
import sys


def version_key(version: str) -> tuple[int, ...]:
    """Return a sort key for versions such as 4.0.0b36: a beta precedes its release."""
    release, _, beta = version.partition("b")
    numbers = [int(number) for number in re.findall(r"\d+", release)[:3]]
    found = re.match(r"\d+", beta)
    return (*numbers, *[0] * (3 - len(numbers)), int(found[0]) if found else sys.maxsize)
