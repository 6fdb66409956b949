"""Stand-ins for values that are not there (yet), and the ranges that values keep to.

    AUTO      the user left it open; `resolve` derives it
    REQUIRED  the user must give it
    INVALID   what was given is wrong, or what it follows from is; whoever computes with it raises UnsettledError

`resolve` skips every derivation and rule that trips over INVALID: its cause is reported already, once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn


class UnsettledError(Exception):
    """A computation met INVALID. Never seen by users: `resolve` catches it."""


@dataclass(frozen=True)
class OpenValue:
    """A value that is still to come. `name` is what help and reprs show."""

    name: str

    def __repr__(self) -> str:
        return self.name


class InvalidValue:
    """Trips whoever computes with it, compares it, tests it or prints it in a message."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "INVALID"

    def _trip(self, *_: object) -> NoReturn:
        raise UnsettledError

    __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = __getattr__ = __call__ = _trip
    __str__ = __format__ = __int__ = __float__ = __index__ = __neg__ = __abs__ = __round__ = __hash__ = _trip
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _trip
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __pow__ = __rpow__ = _trip
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = (
        __rdivmod__
    ) = _trip


# Typed Any, so that a field says what it is once resolved: `kv_channels: int = AUTO`.
AUTO: Final[Any] = OpenValue("AUTO")
REQUIRED: Final[Any] = OpenValue("REQUIRED")
INVALID: Final[Any] = InvalidValue()


def is_settled(value: object) -> bool:
    """Whether this is a value that can be computed with. None is one."""
    return not any(value is stand_in for stand_in in (AUTO, REQUIRED, INVALID))


def settled(value: Any) -> Any:
    """The value itself; trips over INVALID, which could pass through otherwise."""
    if value is INVALID:
        raise UnsettledError
    return value


def whole(amount: int, parts: int) -> int:
    """The quotient, if it is whole; a rule reports it if not."""
    if amount % parts:
        raise UnsettledError
    return amount // parts


@dataclass(frozen=True, kw_only=True)
class Range:
    """The numbers that a field takes. A bound of None is open."""

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


def in_range(
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Mapping[str, Range]:
    """Metadata of a dataclass field that holds a number: `field(default=1, metadata=in_range(at_least=1))`."""
    return {"range": Range(at_least=at_least, above=above, at_most=at_most, below=below)}


def alone_means(value: str) -> Mapping[str, str]:
    """Metadata of a field whose flag may stand without a value: the value that it means then."""
    return {"alone": value}
