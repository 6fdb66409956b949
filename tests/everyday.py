"""Parameters of tests that are many: some run every day, all run nightly."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def nightly(*values: Any) -> Any:
    """Return the parameters of a nightly case."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def only(everyday: Container[Any], values: Iterable[Any]) -> list[Any]:
    """Mark all values but those of every day as nightly."""
    return [value if value in everyday else nightly(value) for value in values]


def one_in(count: int, values: Iterable[Any]) -> list[Any]:
    """Mark all values but every `count`-th as nightly."""
    return [
        value if number % count == 0 else nightly(*(value if isinstance(value, tuple) else (value,)))
        for number, value in enumerate(values)
    ]
