"""Megatron-LM's flags that are no settings here: each is accepted with a line that says why, or refused with a remedy.

    --use-mcore-models          note: --use-mcore-models: there is one model definition here
    --wgrad-deferral-limit 0    note: --wgrad-deferral-limit 0: as it is here; overlap ... is not there yet
    --wgrad-deferral-limit 4    problem: --wgrad-deferral-limit 4: overlap of communication ... is not there yet

The flags are in `megatron_table.py`, by answer. A setting of the same name wins over its line there.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from megatrain.config.errors import Problem
from megatrain.config.megatron.answers import Alias, Answer
from megatrain.config.megatron.flag_table import ALIASES, ANSWERS
from megatrain.config.schema.tree import near_name, settings

_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")


@dataclass(frozen=True)
class MegatronFlag:
    """A flag of Megatron-LM's that is no setting."""

    flag: str
    takes: Literal["nothing", "one", "several"]
    accepted: tuple[str, ...] | None
    """Values that are accepted; of several words, joined by commas. None: whatever is given."""
    answer: Answer


@dataclass(frozen=True)
class AskedFlag:
    """Such a flag as a user gave it. `place`: `file:line: ` of a YAML file, or nothing."""

    flag: MegatronFlag
    words: tuple[str, ...]
    place: str = ""

    def __str__(self) -> str:
        if self.place:
            return f"{self.place}{self.flag.flag[2:].replace('-', '_')}: {' '.join(self.words)}"
        return " ".join((self.flag.flag, *self.words))


@functools.cache
def megatron_flags() -> dict[str, MegatronFlag]:
    """All of them, by flag."""
    flags = [_flag(word, answer) for answer in ANSWERS for word in answer.flags.split()]
    taken = {*_flags_of_settings(), *aliases()}
    return {flag.flag: flag for flag in flags if flag.flag not in taken}


@functools.cache
def aliases() -> dict[str, Alias]:
    """Other names of settings, by flag. Megatron-LM has `--disable-x` beside `--no-x`."""
    switches = {f"--disable-{setting.flag[2:]}": setting for setting in settings() if setting.kind is bool}
    in_table = {word for answer in ANSWERS for word in answer.flags.split()}
    disabling = {flag: Alias(switches[flag].path, "false") for flag in sorted(in_table & switches.keys())}
    taken = _flags_of_settings()
    return {flag: alias for flag, alias in {**ALIASES, **disabling}.items() if flag not in taken}


def asked_flag(flag: MegatronFlag, value: str | Sequence[str] | None, place: str = "") -> AskedFlag:
    """The flag with the words given after it. `value` None: no word."""
    words = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    return AskedFlag(flag, words, place)


def near_flag(word: str) -> str | None:
    """The flag that a mistyped one was most likely meant to be. One that is refused must be very like it."""
    helpful = {*_flags_of_settings(), *aliases(), "--config", "--help", "--version"}
    helpful |= {name for name, flag in megatron_flags().items() if flag.answer.kind == "accepted"}
    near = near_name(word, helpful)
    refused = near_name(word, megatron_flags().keys() - helpful, likeness=0.85)
    return near_name(word, filter(None, (near, refused)))


def answers(asked: Iterable[AskedFlag]) -> tuple[list[str], list[Problem]]:
    """Notes about flags that are accepted, and problems of those that are not: one for all that share an answer."""
    notes: dict[str, list[str]] = {}
    problems: dict[tuple[str, str], list[str]] = {}
    for item in asked:
        told = _answer(item)
        if isinstance(told, Problem):
            problems.setdefault((told.text, told.fix), []).append(str(item))
        else:
            notes.setdefault(told, []).append(str(item))
    return (
        [f"{', '.join(said)}{text}" for text, said in notes.items()],
        [Problem(f"{', '.join(said)}{text}", fix) for (text, fix), said in problems.items()],
    )


def _flags_of_settings() -> set[str]:
    switches = {setting.opposite_flag for setting in settings() if setting.kind is bool}
    return {setting.flag for setting in settings()} | switches


def _flag(word: str, answer: Answer) -> MegatronFlag:
    """`--switch`, `--name=` and what is accepted of its one value, `--name=+` and the same of several (see the table)."""
    name, sign, values = word.partition("=")
    if not sign:
        return MegatronFlag(name, "nothing", () if answer.kind == "refused" else None, answer)
    takes: Literal["one", "several"] = "several" if values.startswith("+") else "one"
    values = values.removeprefix("+")
    return MegatronFlag(
        name, takes, None if values == "*" else tuple(filter(None, values.split("|"))), answer
    )


def _answer(asked: AskedFlag) -> str | Problem:
    """A note or a problem, to be put behind the flag."""
    flag, text = asked.flag, ",".join(" ".join(asked.words).split())
    if text == "null" or (flag.takes == "nothing" and text.lower() in _FALSE):
        return ": as if it were left out"
    if flag.takes == "nothing" and text and text.lower() not in _TRUE:
        return Problem(" has a value, and takes none", f"use {flag.flag} alone, or leave it out")
    is_missing = flag.takes != "nothing" and not text
    if is_missing and flag.accepted != ():
        return Problem(" has no value", f"give {flag.flag} a value, or leave it out")
    is_accepted = flag.accepted is None or any(_is_same(text, value) for value in flag.accepted)
    if flag.answer.kind == "refused" and not is_accepted:
        return Problem(f": {flag.answer.text}", flag.answer.instead)
    if flag.answer.kind == "refused":
        return f": as it is here; {flag.answer.text}"
    if is_accepted:
        return f": {flag.answer.text}"
    values = " or ".join(flag.accepted or ()).replace(",", " ")
    return Problem(
        f" is not to be had: {flag.answer.text}", flag.answer.instead or f"use {flag.flag} {values}"
    )


def _is_same(text: str, value: str) -> bool:
    """Equal as numbers where both are numbers."""
    try:
        return float(text) == float(value)
    except ValueError:
        return text == value
