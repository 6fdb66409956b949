"""Stand-ins for values that are missing or wrong, and the ranges of numbers.

    AUTO      the user left the value open
    OPEN      `resolve` derives the value; reading it from a section raises OpenError until then
    REQUIRED  the user must give the value
    INVALID   the value is wrong, or depends on a wrong value; reading it from a section raises UnresolvedError

A derivation or rule that reads an INVALID value thus stops, and `resolve` continues with the next one: the cause has
been reported already, once. A derivation that reads an open value waits until it is derived.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self


class UnresolvedError(Exception):
    """A derivation or rule depends on an INVALID value. Users never see it: `resolve` catches it."""


class OpenError(Exception):
    """A derivation depends on a value that is not derived yet. Users never see it: `resolve` catches it."""


@dataclass(frozen=True)
class StandIn:
    """A placeholder in a field. `name` is its text in help and reprs."""

    name: str

    def __repr__(self) -> str:
        return self.name


# Typed Any, so that a field has the type of its resolved value: `kv_channels: int = AUTO`.
AUTO: Final[Any] = StandIn("AUTO")
REQUIRED: Final[Any] = StandIn("REQUIRED")
OPEN: Final[Any] = StandIn("OPEN")
INVALID: Final[Any] = StandIn("INVALID")


class CheckedSection:
    """Base of the dataclasses whose fields may be INVALID or OPEN: reading them raises UnresolvedError or OpenError."""

    if not TYPE_CHECKING:  # mypy would accept any name as an attribute

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if value is INVALID:
                raise UnresolvedError
            if value is OPEN:
                raise OpenError(name)
            return value

    def raw(self, name: str) -> Any:
        """Return the value of a field, stand-ins included."""
        return object.__getattribute__(self, name)

    def replaced(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with these values; `dataclasses.replace` would read the INVALID ones."""
        return type(self)(**{**vars(self), **values})


def is_resolved(value: object) -> bool:
    """Return whether this is a value or None, and not a stand-in."""
    return not isinstance(value, StandIn)


def whole(amount: int, parts: int) -> int:
    """Divide without remainder. Raises UnresolvedError otherwise: a rule reports it."""
    if amount % parts:
        raise UnresolvedError
    return amount // parts


@dataclass(frozen=True, kw_only=True)
class Range:
    """The numbers that a field accepts. None: no bound."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def holds(self, number: float) -> bool:
        return not (
            (self.at_least is not None and number < self.at_least)
            or (self.above is not None and number <= self.above)
            or (self.at_most is not None and number > self.at_most)
            or (self.below is not None and number >= self.below)
        )

    def __str__(self) -> str:
        low = [
            f"{word} {bound:g}"
            for word, bound in (("at least", self.at_least), ("above", self.above))
            if bound is not None
        ]
        high = [
            f"{word} {bound:g}"
            for word, bound in (("at most", self.at_most), ("below", self.below))
            if bound is not None
        ]
        return " and ".join(low + high)
