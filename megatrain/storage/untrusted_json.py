"""Untrusted JSON: parsed with bounded memory, and compared with a description of its values.

    bytes ─> limits on size, number of values, characters ─> json ─> checks ─> the value, or InvalidError

A check is a function of a value and its name; checks are combined: `record({"rank": integer(), "host": optional(text())})`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import reprlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

Check = Callable[[Any, str], None]
"""Raises InvalidError if the value, which has this name in the message, is not as described."""

MAX_INTEGER: Final = (1 << 63) - 1
_MAX_DEPTH: Final = 8
_MAX_CHARACTERS: Final = 1 << 20
_MAX_ITEMS: Final = 1 << 20
_FREE_VALUES: Final = 1 << 17
"""Any text may have this many values; the two limits below bound the memory of longer ones."""
_BYTES_PER_VALUE: Final = 4
_BYTES_PER_OBJECT: Final = 32
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


class InvalidError(ValueError):
    """A value is not as described."""


class Bounds(Protocol):
    """The numbers that a value may be. Its text completes the sentence "the value is not ..."."""

    def holds(self, number: float, /) -> bool: ...


def parse_json(text: bytes, *, max_bytes: int) -> Any:
    """Parse JSON in ASCII, as `json.dumps` writes it; memory is at most 20 bytes per byte of text.

    Raises:
        ValueError, RecursionError: it is too large, or not valid JSON.
    """
    if len(text) > max_bytes:
        raise InvalidError(f"{len(text)} bytes, more than the limit of {max_bytes}")
    num_objects = text.count(b"{")
    num_values = num_objects + text.count(b"[") + text.count(b",")
    is_dense = num_values > len(text) // _BYTES_PER_VALUE or num_objects > len(text) // _BYTES_PER_OBJECT
    if is_dense and num_values > _FREE_VALUES:
        raise InvalidError(f"{num_values} values in {len(text)} bytes")
    value = json.loads(text.decode("ascii"))
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # raises ValueError for half of a surrogate pair
    return value


def integer(least: int = 0, most: int = MAX_INTEGER) -> Check:
    """Describe a whole number."""

    def check(value: Any, name: str) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise InvalidError(
                f"{name} {shown(value)} is not an integer of at least {least} and at most {most}"
            )

    return check


def number(within: Bounds | None = None) -> Check:
    """Describe a finite number."""

    def check(value: Any, name: str) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= MAX_INTEGER * 1e100:
            raise InvalidError(f"{name} {shown(value)} is not a finite number")
        if within is not None and not within.holds(value):
            raise InvalidError(f"{name} {shown(value)} is not {within}")

    return check


def text(choices: Sequence[str] = (), *, max_characters: int = _MAX_CHARACTERS) -> Check:
    """Describe a string; one of `choices`, if there are any."""

    def check(value: Any, name: str) -> None:
        if not isinstance(value, str) or len(value) > max_characters:
            raise InvalidError(
                f"{name} {shown(value)} is not a string of at most {max_characters} characters"
            )
        if choices and value not in choices:
            raise InvalidError(f"{name} {shown(value)} is not one of {', '.join(choices)}")

    return check


def flag(value: Any, name: str) -> None:
    """Describe true or false."""
    if not isinstance(value, bool):
        raise InvalidError(f"{name} {shown(value)} is not true or false")


def optional(check_value: Check) -> Check:
    """Describe null or a value."""

    def check(value: Any, name: str) -> None:
        if value is not None:
            check_value(value, name)

    return check


def list_of(check_item: Check, *, most: int = _MAX_ITEMS) -> Check:
    """Describe a list."""

    def check(value: Any, name: str) -> None:
        if not isinstance(value, list) or len(value) > most:
            raise InvalidError(f"{name} {shown(value)} is not a list of at most {most} values")
        for number_of_item, item in enumerate(value):
            check_item(item, f"{name}[{number_of_item}]")

    return check


def map_of(check_item: Check) -> Check:
    """Describe an object with any names."""

    def check(value: Any, name: str) -> None:
        for key, item in json_object(value, name).items():
            check_item(item, f"{name}.{key}")

    return check


def record(required: Mapping[str, Check], optional_fields: Mapping[str, Check] | None = None) -> Check:
    """Describe an object. Names that are not described may have any value: another version of the program has them."""
    fields = {**required, **(optional_fields or {})}

    def check(value: Any, name: str) -> None:
        items = json_object(value, name)
        missing = next((key for key in required if key not in items), None)
        if missing is not None:
            raise InvalidError(f"{name}.{missing} is missing")
        for key, item in items.items():
            fields.get(key, anything)(item, f"{name}.{key}")

    return check


def record_of(
    kind: type, *, within: Bounds | None = None, is_complete: bool = True, may_lack: Sequence[str] = ()
) -> Check:
    """Describe an object by the fields of a dataclass; numbers are in the range of the field, or else in `within`.

    Args:
        is_complete: every field must be present.
        may_lack: fields that an older version did not store.
    """
    hints = typing.get_type_hints(kind)
    fields = {
        field.name: _choice(field.metadata)
        or _of_type(hints[field.name], field.metadata.get("range", within))
        for field in dataclasses.fields(kind)
    }
    required = {name: check for name, check in fields.items() if is_complete and name not in may_lack}
    return record(required, fields)


def anything(value: Any, name: str, depth: int = _MAX_DEPTH) -> None:
    """Describe any value of bounded nesting."""
    if depth == 0:
        raise InvalidError(f"{name} is nested too deeply")
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        anything(item, name, depth - 1)


def json_object(value: Any, name: str) -> dict[str, Any]:
    """Return a value that must be an object."""
    if not isinstance(value, dict):
        raise InvalidError(f"{name} is not a JSON object")
    return value


def shown(value: Any) -> str:
    """Return a short form of a value for a message."""
    return reprlib.repr(value)


def _choice(metadata: Mapping[str, Any]) -> Check | None:
    """Return the check of a field with choices, None for another field. A function of the user's own is `file.py:name`."""
    if "meanings" not in metadata:
        return None
    one = text(tuple(metadata["meanings"]))

    def check(value: Any, name: str) -> None:
        is_function = metadata.get("accepts_function") and isinstance(value, str) and ":" in value
        (text() if is_function else one)(value, name)

    return check


def _of_type(hint: Any, within: Bounds | None) -> Check:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return optional(_of_type(inner, within))
    if origin is typing.Literal:
        return text(arguments)
    if origin is tuple:
        return list_of(_of_type(arguments[0], within))
    if hint is bool:
        return flag
    if hint is str:
        return text()
    in_range = number(within)
    if hint is float:
        return in_range
    assert hint is int, f"{hint} has no description"
    whole = integer(-MAX_INTEGER)

    def check(value: Any, name: str) -> None:
        whole(value, name)
        in_range(value, name)

    return check
