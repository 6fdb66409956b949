"""Translate Megatron-LM's flags into megatrain's, and check whether the run would start.

flags ─> old names replaced, flags without effect left out ─> parse, resolve for a machine with GPUs ─> Plan or problems
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from megatrain.config import ConfigError, Facts, Plan, Problem, parse, resolve
from megatrain.config.cli.command_line import flag_values, modern_name, takes, target
from megatrain.config.cli.flag_words import FlagWords, is_flag, list_words
from megatrain.config.megatron.flags import GivenFlag, answer_to, answers
from megatrain.config.plan_note import PlanNote
from megatrain.config.request import Given
from megatrain.config.schema.tree import settings, settings_by_path
from megatrain.tools.port.words import Part, Word, plain, quoted, without_start

H100: Final = Facts(
    device="cuda",
    device_name="NVIDIA H100 80GB HBM3",
    device_capability=(9, 0),
    libraries={
        "torch": "2.11.0",
        "transformer_engine": "2.20.2",
        "flash-attn-4": "4.0.0",
        "tensorboard": "2.20",
        "wandb": "0.20",
    },
)
"""A machine on which every flag for GPUs can start. No file is read."""
_VOCABULARY: Final = 50257
"""Size of a tokenizer whose files are not read: GPT-2's."""


@dataclass(frozen=True)
class PortedFlag:
    """A flag with the words of the script, or words of the script whose flags are not known."""

    flag: FlagWords | None
    words: tuple[Word, ...]

    @property
    def line(self) -> str:
        if self.flag is None:  # unquoted: it may hold several flags
            return " ".join(map(plain, self.words))
        return " ".join([self.flag.flag, *map(quoted, self.words)])


@dataclass(frozen=True)
class Translation:
    """The flags for megatrain, and what changed."""

    flags: tuple[PortedFlag, ...]
    changed: tuple[str, ...]
    repeated: tuple[str, ...]
    """Flags that are left out since they are given again later."""
    ignored: tuple[PlanNote, ...]
    """Flags that are left out since they have no effect."""

    @property
    def argv(self) -> list[str]:
        """The arguments of the known flags."""
        return [word for item in self.flags if item.flag for word in (item.flag.flag, *item.flag.words)]


def from_script(arguments: Sequence[Word]) -> list[PortedFlag]:
    """Return the flags of a command. An open word that is no flag's value stands alone."""
    found: list[PortedFlag] = []
    for word in arguments:
        text = plain(word)
        name, sign, _ = text.partition("=")
        last = found[-1] if found else None
        if is_flag(text) and not any(part.is_open for part in word[:1]):
            words = (without_start(word, len(name) + 1),) if sign else ()
            found.append(PortedFlag(FlagWords(name, tuple(map(plain, words))), words))
        elif last is None or last.flag is None or (_is_open(word) and not _has_room(last.flag)):
            found.append(PortedFlag(None, (word,)))
        else:
            flag = FlagWords(last.flag.typed, (*last.flag.words, text))
            found[-1] = PortedFlag(flag, (*last.words, word))
    return found


def from_yaml(flag: FlagWords, given: Mapping[str, str]) -> PortedFlag | None:
    """Return a line of a YAML file as a flag; None if it turns off what is off by default.

    Args:
        given: values of environment variables in the file.
    """
    words = flag.words
    if takes(flag) == "several":
        words = list_words(" ".join(words).split())
    words = tuple(plain(_with_variables(word, given)) for word in words)
    has_default = any(
        isinstance(item, Given) and item.value is setting.default and flag.flag == setting.opposite_flag
        for item in flag_values(flag)
        for setting in settings()
        if setting.kind is bool and isinstance(item, Given) and setting.path == item.path
    )
    if has_default:
        return None
    return PortedFlag(
        FlagWords(flag.typed, words, flag.place, flag.written),
        tuple(_with_variables(word, given) for word in words),
    )


def translate(flags: Sequence[PortedFlag]) -> Translation:
    """Replace old names, and leave out repeated flags and those that change nothing here."""
    new = [_modern(item) for item in flags]
    last = {target(item.flag): item for item in new if item.flag}
    kept: list[PortedFlag] = []
    repeated: list[str] = []
    ignored: list[GivenFlag] = []
    for item in new:
        if item.flag and last[target(item.flag)] is not item:
            repeated.append(f"{item.flag}: given again later")
        elif item.flag and (answered := _without_effect(item.flag)):
            ignored.append(answered)
        else:
            kept.append(item)
    changed = tuple(
        f"{old.flag.name} -> {after.line if after.words != old.words else after.flag.flag}: the name here"
        for old, after in zip(flags, new, strict=True)
        if old.flag and after.flag and after.flag.flag != old.flag.flag
    )
    return Translation(tuple(kept), changed, tuple(repeated), tuple(answers(ignored)[0]))


def _modern(item: PortedFlag) -> PortedFlag:
    """Return a flag under its name here."""
    if item.flag is None:
        return item
    name, *values = modern_name(item.flag.flag)
    flag = item.flag
    if name != flag.flag:
        flag = FlagWords(name, (*flag.words, *values), flag.place, flag.written)
    return PortedFlag(flag, (*item.words, *((Part(value),) for value in values)))


def _without_effect(flag: FlagWords) -> GivenFlag | None:
    """Return a flag of Megatron-LM that changes nothing here; None for other flags."""
    for item in flag_values(flag):
        if isinstance(item, GivenFlag) and item.flag.answer.kind != "pending":
            return item if isinstance(answer_to(item), PlanNote) else None
    return None


def check(
    translation: Translation, world_size: int | None, source: str
) -> tuple[Plan | None, list[Problem], int]:
    """Resolve the flags for GPUs with Transformer Engine. Files, data and checkpoints are not read.

    Args:
        world_size: None: the smallest number of ranks for the layout.
        source: the script, for the remedies of open values.
    Returns:
        The plan or the problems, and the number of ranks.
    """
    request = parse(translation.argv)
    size = world_size or request.fewest_ranks()
    vocab_size = request.known("tokenizer.vocab_size") or _VOCABULARY
    facts = replace(H100, world_size=size, vocab_size=vocab_size, eod_id=0)
    try:
        return resolve(request, facts), [], size
    except ConfigError as error:
        return None, [_with_open_value(problem, translation, source) for problem in error.problems], size


def _with_open_value(problem: Problem, translation: Translation, source: str) -> Problem:
    """Give the remedy for a number or choice that the script leaves open: its variable as an argument."""
    for item in translation.flags:
        names = [part.name for word in item.words for part in word if part.name]
        if (
            item.flag
            and names
            and not _is_free_text(item.flag)
            and problem.text.startswith(f"{item.flag.flag} ")
        ):
            fix = f"give the value that the script leaves open: megatrain port {source} {names[0]}=VALUE"
            return Problem(problem.text, fix)
    return problem


def _is_free_text(flag: FlagWords) -> bool:
    """Return whether a flag takes any text, such as a path."""
    kinds = settings_by_path()
    setting = kinds.get(target(flag))
    return setting is None or (setting.kind is str and not setting.choices and not setting.joins_words)


def _with_variables(text: str, given: Mapping[str, str]) -> Word:
    """Return a text of a YAML file with the values of its environment variables; others stay."""
    parts = []
    for piece in re.split(r"(\$\{\w+\}|\$\w+)", text):
        name = re.sub(r"\W", "", piece)
        is_open = piece.startswith("$") and bool(name) and name not in given
        text = given.get(name, piece) if piece.startswith("$") else piece
        parts.append(Part(text, is_open, name if is_open else ""))
    return tuple(part for part in parts if part.text)


def _is_open(word: Word) -> bool:
    return len(word) == 1 and word[0].is_open


def _has_room(flag: FlagWords) -> bool:
    """Return whether an open word is the value of a flag, and not other flags."""
    return takes(flag) == "several" or (takes(flag) == "one" and not flag.words)
