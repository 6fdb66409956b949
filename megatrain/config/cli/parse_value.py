"""Parse the text of a flag or of a YAML scalar into a value of the field's type.

("--lr", "1e-4") -> 0.0001        ("--num-layers", "1.5") -> BadValueError("is not a whole number")
"""

import math
import re
from collections.abc import Sequence
from typing import Any, Final

from megatrain.config.errors import is_unicode
from megatrain.config.megatron.flag_table import REPLACED_CHOICES, UNSUPPORTED_CHOICES
from megatrain.config.schema.tree import Setting, closest_name
from megatrain.config.schema.values import AUTO
from megatrain.config.user_function import UserFunction

# More than any count needs, and few enough that products of several counts are finite floats.
_MAX_DIGITS: Final = 24

RawValue = str | Sequence[str] | None
"""Text, several texts, or YAML's null."""


class BadValueError(Exception):
    """A value that a setting does not accept. `text` continues a sentence that starts with flag and value."""

    def __init__(self, text: str, *, fix: str) -> None:
        super().__init__(text)
        self.text = text
        self.fix = fix


def load_value(setting: Setting, raw: RawValue) -> Any:
    """Parse a raw value. Raises BadValueError if it is not valid."""
    if raw is None or (setting.accepts_none and (raw == "none" or list(raw) == ["none"])):
        return _no_value(setting)
    if setting.is_list:
        return tuple(_entry(setting, text) for text in ((raw,) if isinstance(raw, str) else raw))
    if not isinstance(raw, str):
        raise BadValueError("is not one value", fix=value_fix(setting))
    if raw == "auto" and setting.is_derived_if_open:
        return AUTO
    return _entry(setting, raw)


def _entry(setting: Setting, text: str) -> Any:
    return _choice(setting, text) if setting.choices else _scalar(setting, text)


def _no_value(setting: Setting) -> Any:
    """Return the value of `none` on the command line and of null in YAML, which undo an earlier value."""
    if not setting.accepts_none:
        raise BadValueError("has no value", fix=value_fix(setting))
    if setting.is_optional:
        return None
    return AUTO if setting.is_derived_if_open else ()


def _scalar(setting: Setting, text: str) -> Any:
    if setting.kind is bool:
        return _boolean(setting, text)
    if setting.kind is str:
        if not is_unicode(text):
            raise BadValueError("is not UTF-8", fix="rename the file, or write the text in UTF-8")
        return text
    number = _integer(setting, text) if setting.kind is int else _float(setting, text)
    require_in_range(setting, number)
    return number


def require_in_range(setting: Setting, *numbers: float) -> None:
    """Raise BadValueError for a number out of range."""
    if setting.range and not all(map(setting.range.holds, numbers)):
        raise BadValueError(f"must be {setting.range}", fix=value_fix(setting))


def value_fix(setting: Setting) -> str:
    """Return the fix of a value that a setting does not accept."""
    return f"give {setting.flag} {accepted_values(setting)}"


def accepted_values(setting: Setting) -> str:
    """Describe the values that a setting accepts: `a whole number at least 1, or auto`."""
    if setting.choices:
        words = (
            f"one or more of {', '.join(setting.choices)}"
            if setting.is_list
            else " or ".join(setting.choices)
        )
        words += " or a function such as my_file.py:my_function" * setting.accepts_function
    elif setting.is_list:
        words = "one or more " + {int: "whole numbers", float: "numbers", str: "values"}[setting.kind]
    else:
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[setting.kind]
    if setting.range and str(setting.range):
        words += f" {setting.range}"
    words += ", or no value" * (setting.alone is not None)
    words += ", or none" * (setting.is_optional or setting.default == ())
    return words + ", or auto" * setting.is_derived_if_open


def _choice(setting: Setting, text: str) -> str:
    is_function = setting.accepts_function and UserFunction.parse(text, setting.flag) is not None
    if text in setting.choices or is_function:
        return text
    by_lower = {choice.lower(): choice for choice in setting.choices}
    elsewhere = REPLACED_CHOICES.get(setting.flag, {})
    if text in elsewhere:
        raise BadValueError("is not a choice of its own here", fix=elsewhere[text])
    if text in UNSUPPORTED_CHOICES.get(setting.flag, ()):
        without = f"remove {setting.flag}, or " if setting.default is None else ""
        raise BadValueError("is not supported yet", fix=f"{without}{value_fix(setting)}")
    near = closest_name(text.lower(), by_lower)
    hint = f"did you mean {by_lower[near]}? " if near else ""
    is_not = f"has {text}, which is no choice" if setting.is_list else "is not a choice"
    raise BadValueError(is_not, fix=f"{hint}{value_fix(setting)}")


def _boolean(setting: Setting, text: str) -> bool:
    known = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if text.lower() in known:
        return known[text.lower()]
    raise BadValueError(
        "is neither true nor false", fix=f"use {setting.flag} for true, {setting.opposite_flag} for false"
    )


def _integer(setting: Setting, text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+(_[0-9]+)*", text):
        raise BadValueError("is not a whole number", fix=value_fix(setting))
    if len(text) > _MAX_DIGITS:
        raise BadValueError("is too large", fix=value_fix(setting))
    return int(text)


def _float(setting: Setting, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise BadValueError("is not a number", fix=value_fix(setting)) from None
    if math.isfinite(number):
        return number
    raise BadValueError("is not finite", fix=value_fix(setting))
