"""Parameters of tests that are many: some run every day, all run nightly."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(count: int, values: Iterable[Any]) -> list[Any]:
    """Mark all values but every `count`-th as nightly."""
    return [
        value
        if number % count == 0
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.nightly)
        for number, value in enumerate(values)
    ]
