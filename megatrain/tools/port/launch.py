"""The training command of a launch script: launcher, program, flags, and the number of ranks."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatrain.tools.port.shell_script import Command, ShellScript, Word, plain

FAMILIES: Final = {
    "pretrain_gpt.py": "gpt",
    "pretrain_bert.py": "bert",
    "pretrain_t5.py": "t5",
    "pretrain_vlm.py": "vlm",
    "pretrain_hybrid.py": "hybrid",
    "pretrain_mamba.py": "hybrid",
}
"""`--model-family` of Megatron-LM's programs; `scripts/megatron` has programs of these names."""
_PROGRAM: Final = re.compile(r"(?:.*/)?pretrain\w*\.py")
_SHELLS: Final = frozenset({"sh", "bash", "zsh"})
_NOT_LAUNCHERS: Final = frozenset({"echo", "printf", "cat", "cp", "ls", "grep", "test", "[", "[[", "sed"})
_SBATCH: Final = re.compile(r"^#SBATCH[ \t]+([^#\n]*)", re.MULTILINE)


@dataclass(frozen=True)
class Launch:
    """A training command."""

    line: int
    wrapper: tuple[Word, ...]
    """Words before the text of `sh -c TEXT`; empty if the command is not in such a text."""
    launcher: tuple[Word, ...]
    """Words before the program."""
    program: str
    arguments: tuple[Word, ...]
    """Words after the program."""
    notes: tuple[str, ...]
    """Parts of the script around the command that are left out."""


def find_launch(script: ShellScript, text: str) -> Launch | None:
    """Return the first command of the script that runs a `pretrain*.py`; None: there is none."""
    first: Launch | None = None
    for command in script.commands(text):
        for wrapper, found in _unwrapped(script, command):
            if first is None:
                first = _launch(script.file, wrapper, found)
                continue
            script.not_read.append(f"{script.file}:{found.line}: another training command: left out")
    return first


def _unwrapped(script: ShellScript, command: Command) -> Iterator[tuple[tuple[Word, ...], Command]]:
    """Yield the training command after the words that wrap it: it may be in the text of `eval TEXT` or `sh -c TEXT`."""
    wrapped = _wrapper_and_text(command)
    if wrapped is None:
        if plain(command.words[0]) not in _NOT_LAUNCHERS and _program_at(command) is not None:
            yield (), command
        return
    wrapper, text = wrapped
    # The inner shell expands variables of a text in single quotes.
    is_inner = bool(wrapper) and not any(part.is_open for part in command.words[len(wrapper)])
    inner = list(script.commands(text, first_line=command.line))
    if all(_program_at(found) is None for found in inner):
        return
    for found in inner:
        if _program_at(found) is None:
            shown = " ".join(map(plain, found.words))
            script.not_read.append(
                f"{script.file}:{command.line}: `{shown}` before or after the command: left out"
            )
            continue
        words = tuple(map(_escaped, found.words)) if is_inner else found.words
        following = found.following.strip("&|") or command.following
        yield wrapper, Command(command.line, words, command.is_nested or found.is_nested, following)


def _wrapper_and_text(command: Command) -> tuple[tuple[Word, ...], str] | None:
    """Return the words up to a text that another shell runs, and the text; None: there is no such text."""
    words = [plain(word) for word in command.words]
    if words[0] == "eval":
        return (), " ".join(words[1:]).replace("\\$", "$")
    for number, (word, flag) in enumerate(itertools.pairwise(words[:-1])):
        if word.rpartition("/")[2] in _SHELLS and re.fullmatch(r"-\w*c", flag):
            return command.words[: number + 2], words[number + 2]
    return None


def _escaped(word: Word) -> Word:
    """Return a word whose open parts the outer shell leaves alone."""
    return tuple(
        dataclasses.replace(part, text=f"\\{part.text}")
        if part.is_open and not part.text.startswith("\\")
        else part
        for part in word
    )


def _program_at(command: Command) -> int | None:
    words = enumerate(plain(word) for word in command.words)
    return next((number for number, word in words if _PROGRAM.fullmatch(word)), None)


def _launch(file: str, wrapper: tuple[Word, ...], command: Command) -> Launch:
    at = _program_at(command)
    assert at is not None
    place, notes = f"{file}:{command.line}", []
    if command.is_nested:
        notes.append(f"{place}: the command is inside a condition, a loop or a function: shown once")
    if command.following:
        notes.append(f"{place}: what follows the command, from `{command.following}` on: left out")
    program = plain(command.words[at])
    return Launch(command.line, wrapper, command.words[:at], program, command.words[at + 1 :], tuple(notes))


def world_size(launch: Launch, text: str) -> int | None:
    """Return the number of ranks that the launcher and the #SBATCH lines of a script name; None: it is open."""
    slurm = [word for line in _SBATCH.findall(text) for word in line.split()]
    words = [plain(word) for word in (*launch.wrapper, *launch.launcher)]
    nodes = _number(_option([*slurm, *words], "--nodes", "-N"))
    per_node = _option(words, "--nproc-per-node")
    if per_node is not None:
        given = _option(words, "--nnodes")
        num_nodes = 1 if given is None else _number(given.partition(":")[0]) or nodes
        return _product(_number(per_node), num_nodes)
    tasks = _number(_option([*slurm, *words], "--ntasks", "-n", "-np"))
    if tasks is not None:
        return tasks
    tasks_per_node = _number(_option([*slurm, *words], "--ntasks-per-node", "--tasks-per-node"))
    if (
        tasks_per_node is None
        and nodes is None
        and Path(words[0] if words else "python").name.startswith("python")
    ):
        return 1
    return _product(tasks_per_node, nodes)


def _option(words: Sequence[str], *names: str) -> str | None:
    """Return the last value of an option, given as `--name value`, `--name=value` or with `_` for `-`."""
    value = None
    for number, word in enumerate(words):
        name, sign, text = word.partition("=")
        if name.replace("_", "-") in names:
            value = text if sign else next(iter(words[number + 1 :]), None)
    return value


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _product(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first * second
