"""Answers to Megatron-LM's flags that are not settings: a note if the flag is ignored, a problem if it is refused.

    --use-mcore-models          note: --use-mcore-models is ignored: megatrain has one model definition
    --delay-wgrad-compute       note: --delay-wgrad-compute has no effect so far: delayed weight gradients ... are missing, and ...
    --moe-use-upcycling false   note: --moe-use-upcycling false has no effect: upcycling ... is not supported
    --moe-use-upcycling         problem: --moe-use-upcycling: upcycling ... is not supported

Notation of the flags in the tables (`flag_table.py`); a setting of the same name takes precedence over its entry:

    --name            a switch: accepted if the answer is `accepted`
    --name=           one value; every value is refused
    --name=a|b        one value; a and b are accepted because megatrain behaves that way, others are refused
    --name=*          one value; every value is accepted
    --name=+...       the same with several values; `a,b` stands for `a b`
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from megatrain.config.errors import Problem
from megatrain.config.megatron.answer import Alias, Answer
from megatrain.config.megatron.flag_table import ALIASES, ANSWERS
from megatrain.config.megatron.removed_flags import RENAMED_FLAGS
from megatrain.config.plan_note import PlanNote
from megatrain.config.schema.tree import closest_name, settings

_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")


@dataclass(frozen=True)
class MegatronFlag:
    """A flag of Megatron-LM that is not a setting."""

    flag: str
    takes: Literal["nothing", "one", "several"]
    accepted: tuple[str, ...] | None
    """Accepted values, several words joined by commas; None: every value."""
    answer: Answer


@dataclass(frozen=True)
class GivenFlag:
    """A flag of Megatron-LM as the user gave it."""

    flag: MegatronFlag
    words: tuple[str, ...]
    shown: str = ""
    """Place, name and words in a YAML file; empty on the command line."""

    def __str__(self) -> str:
        return self.shown or " ".join((self.flag.flag, *self.words))


@functools.cache
def megatron_flags() -> dict[str, MegatronFlag]:
    """Return the flags of all tables that are neither settings nor aliases, by flag."""
    flags = [_parse_entry(word, answer) for answer in ANSWERS for word in answer.flags.split()]
    taken = {*_flags_of_settings(), *aliases()}
    return {flag.flag: flag for flag in flags if flag.flag not in taken}


@functools.cache
def aliases() -> dict[str, Alias]:
    """Return the other names of settings, by flag. Megatron-LM accepts `--disable-x` as well as `--no-x`."""
    switches = {f"--disable-{setting.flag[2:]}": setting for setting in settings() if setting.kind is bool}
    in_table = {word for answer in ANSWERS for word in answer.flags.split()}
    disabling = {flag: Alias(switches[flag].path, "false") for flag in sorted(in_table & switches.keys())}
    taken = _flags_of_settings()
    return {flag: alias for flag, alias in {**ALIASES, **disabling}.items() if flag not in taken}


def closest_flag(word: str) -> str | None:
    """Return the flag that a mistyped one most likely means: the shortest that it begins, else a similar one.

    Refused flags must be more similar than others.
    """
    helpful = {*_flags_of_settings(), *aliases(), "--config", "--help", "--version"}
    helpful |= {name for name, flag in megatron_flags().items() if not flag.answer.is_refusal}
    begun = [name for name in helpful if name.startswith(f"{word}-")]
    if begun and word not in helpful:
        return min(begun, key=lambda name: (len(name), name))
    near = closest_name(word, helpful)
    refused = closest_name(word, megatron_flags().keys() - helpful, similarity=0.85)
    return closest_name(word, filter(None, (near, refused)))


def renamed(flag: str) -> str | None:
    """Return the new name of an old flag that takes the same values; None: there is none."""
    names = {old.partition("=")[0]: new for old, new in RENAMED_FLAGS.items()}
    new = names.get(flag)
    return new if new in _flags_of_settings() else None


def answers(given: Iterable[GivenFlag]) -> tuple[list[PlanNote], list[Problem]]:
    """Return the notes about accepted flags and the problems of refused ones. Flags with the same answer share one."""
    notes: dict[PlanNote, list[str]] = {}
    problems: dict[tuple[str, str], list[str]] = {}
    for item in given:
        answer = answer_to(item)
        if isinstance(answer, Problem):
            problems.setdefault((answer.text, answer.fix), []).append(str(item))
        else:
            notes.setdefault(answer, []).append(str(item))
    return (
        [PlanNote(_joined(flags, text), text.grade, text.saves_memory) for text, flags in notes.items()],
        [Problem(_joined(flags, text), fix) for (text, fix), flags in problems.items()],
    )


def _joined(flags: Sequence[str], text: str) -> str:
    """Return the sentence about these flags; `text` is about one."""
    if len(flags) == 1:
        return f"{flags[0]}{text}"
    for one, several in ((" is ", " are "), (" has ", " have ")):
        if text.startswith(one):
            text = f"{several}{text.removeprefix(one)}"
            break
    return f"{', '.join(flags[:-1])} and {flags[-1]}{text}"


def _flags_of_settings() -> set[str]:
    switches = {setting.opposite_flag for setting in settings() if setting.kind is bool}
    return {setting.flag for setting in settings()} | switches


def _parse_entry(word: str, answer: Answer) -> MegatronFlag:
    name, sign, values = word.partition("=")
    if not sign:
        return MegatronFlag(name, "nothing", () if answer.is_refusal else None, answer)
    takes: Literal["one", "several"] = "several" if values.startswith("+") else "one"
    values = values.removeprefix("+")
    return MegatronFlag(
        name, takes, None if values == "*" else tuple(filter(None, values.split("|"))), answer
    )


def answer_to(given: GivenFlag) -> PlanNote | Problem:
    """Return a note or a problem; its text follows the flag."""
    flag, text = given.flag, ",".join(" ".join(given.words).split())
    if text == "null" or (flag.takes == "nothing" and text.lower() in _FALSE):
        return PlanNote(" has no effect", "nothing")
    if flag.takes == "nothing" and text and text.lower() not in _TRUE:
        return Problem(" has a value, and accepts none", f"use {flag.flag} alone, or remove it")
    if flag.takes != "nothing" and flag.accepted != () and not text:
        return Problem(" has no value", f"give {flag.flag} a value, or remove it")
    is_accepted = flag.accepted is None or any(_is_equal(text, value) for value in flag.accepted)
    return _note(flag) if is_accepted else _refusal(flag)


def _note(flag: MegatronFlag) -> PlanNote:
    answer = flag.answer
    if answer.kind == "pending":
        text = f" has no effect so far: {answer.feature} is missing, and {answer.text}"
    else:
        text = f" {'is ignored' if answer.kind == 'accepted' else 'has no effect'}: {answer.text}"
    return PlanNote(text, answer.grade, answer.saves_memory)


def _refusal(flag: MegatronFlag) -> Problem:
    if flag.answer.is_refusal:
        return Problem(f": {flag.answer.text}", flag.answer.instead)
    values = " or ".join(flag.accepted or ()).replace(",", " ")
    return Problem(
        f" is not supported: {flag.answer.text}", flag.answer.instead or f"use {flag.flag} {values}"
    )


def _is_equal(text: str, value: str) -> bool:
    """Compare as numbers if both are numbers."""
    try:
        return float(text) == float(value)
    except ValueError:
        return text == value
