"""What can go wrong for a user, and the exit code that says which of it happened.

    MegatrainError     1   something failed while running
    ConfigError        2   the command line, the configuration or an input file: nothing was started
    NoCheckpointError  3   `--load` was asked for, and no valid checkpoint is there

Every message says what is wrong, with its values, and then what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and what to do about it. `text` names the flag or the `file:line`."""

    text: str
    fix: str

    def __str__(self) -> str:
        return f"{self.text}\n  fix: {self.fix}"


class MegatrainError(Exception):
    """An error whose message is meant for the user: the entry points print it without a traceback."""

    exit_code = 1
    is_reported = False
    """Whether another rank tells the user, so that this one ends without a word."""

    def __init__(self, problem: str, *, fix: str) -> None:
        self.problems: tuple[Problem, ...] = (Problem(problem, fix),)
        super().__init__(str(self.problems[0]))


class ConfigError(MegatrainError):
    """A run that cannot work as described: found before anything was started or written."""

    exit_code = 2

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> ConfigError:
        """All problems at once, so that a user mends them in one go."""
        assert problems, "an error needs a problem"
        error = cls(problems[0].text, fix=problems[0].fix)
        error.problems = tuple(problems)
        error.args = ("\n".join(str(problem) for problem in problems),)
        return error


class InputError(ConfigError):
    """A file that is not what it should be. The problem starts with `file:` or `file:line:`."""


class NoCheckpointError(MegatrainError):
    """`--load` names a place that holds no valid checkpoint."""

    exit_code = 3


def describe(error: MegatrainError) -> str:
    """What a user reads: all problems, numbered where they are several."""
    problems = error.problems
    if len(problems) == 1:
        return f"error: {problems[0]}"
    lines = [f"error: {len(problems)} problems"]
    lines += [f"{number}. {problem}".replace("\n", "\n   ") for number, problem in enumerate(problems, 1)]
    return "\n".join(lines)
