"""Errors for the user, and their exit codes.

    MegatrainError     1   something failed while running
    ConfigError        2   the command line, the configuration or an input file is wrong: nothing was started
    NoCheckpointError  3   `--load` is given, and there is no valid checkpoint

Every message states the problem with its values, and then one imperative sentence: the fix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def is_unicode(text: str) -> bool:
    """Return whether a text has no half of a surrogate pair, which Python also makes of bytes that are not UTF-8."""
    if text.isascii():  # O(1)
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True)
class Problem:
    """A problem and its fix. `text` names the flag or the `file:line`."""

    text: str
    fix: str

    def __str__(self) -> str:
        return f"{self.text}\n  fix: {self.fix}"


class MegatrainError(Exception):
    """Base of the errors for the user: the entry points print the message without a traceback."""

    exit_code = 1

    def __init__(self, problem: str, *, fix: str, is_reported: bool = False) -> None:
        self.problems: tuple[Problem, ...] = (Problem(problem, fix),)
        self.is_reported = is_reported
        """True if another rank reports the error, so that this one exits silently."""
        super().__init__(str(self.problems[0]))


class ConfigError(MegatrainError):
    """A run that cannot work as described. Raised before anything is started or written."""

    exit_code = 2

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> ConfigError:
        """Return one error for all problems, so that the user can fix them together."""
        assert problems, "an error needs a problem"
        error = cls(problems[0].text, fix=problems[0].fix)
        error.problems = tuple(problems)
        error.args = ("\n".join(str(problem) for problem in problems),)
        return error


class InputError(ConfigError):
    """An invalid input file. The problem starts with `file:` or `file:line:`."""


class NoCheckpointError(MegatrainError):
    """No valid checkpoint in the folder of `--load`."""

    exit_code = 3


def describe(error: MegatrainError) -> str:
    """Format all problems for the user, numbered if there are several."""
    problems = error.problems
    if len(problems) == 1:
        return f"error: {problems[0]}"
    lines = [f"error: {len(problems)} problems"]
    lines += [f"{number}. {problem}".replace("\n", "\n   ") for number, problem in enumerate(problems, 1)]
    return "\n".join(lines)
