"""Apply the fix of a refusal to a command line, as a user would: a fix that is refused in turn is a finding.

"use --seq-length 21, or remove --sequence-parallel"  ─>  --seq-length 21        the first alternative; other texts: None
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from megatrain.config import Problem
from megatrain.config.schema.tree import settings
from megatrain.tools.parity.runs.case import Flag, Start, merged

_FIRST: Final = re.compile(r"(use|add|give|set|remove|leave out) (--.*)")
_END: Final = re.compile(r", or |; | or |, such as |: ")
_CHOICES: Final = {setting.flag: set(setting.choices) for setting in settings()}
_WITH_VALUES: Final = {setting.flag for setting in settings() if setting.kind is not bool}


def fixed_start(start: Start, problems: Sequence[Problem]) -> Start | None:
    """Return the start after the fixes of its problems; None: a fix is not a plain change of flags."""
    flags = list(start.flags)
    for problem in problems:
        found = _FIRST.match(problem.fix)
        named = _flags_of(_END.split(found[2])[0]) if found else None
        if found is None or named is None:
            return None
        names = {flag[0] for flag in named}
        if found[1] in ("remove", "leave out"):
            flags = [flag for flag in flags if flag[0] not in names]
        elif any(len(flag) == 1 and flag[0] in _WITH_VALUES for flag in named):
            return None  # the value is the user's choice
        else:
            flags += named
    return replace(start, flags=merged(flags))


def _flags_of(text: str) -> list[Flag] | None:
    """Return the flags that a text consists of, with the first of values between commas; None if it has other words."""
    found: list[list[str]] = []
    for part in text.split(", "):
        is_other_value = bool(found) and not part.startswith("--")
        for word in part.split():
            if word.startswith("--"):
                found.append([word])
                is_other_value = False
            elif found and (re.search(r"\d", word) or word in _CHOICES.get(found[-1][0], ())):
                if not is_other_value:
                    found[-1].append(word)
            elif word != "and":
                return None
    return [tuple(flag) for flag in found]
