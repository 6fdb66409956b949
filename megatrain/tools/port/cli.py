"""`megatrain port`: print the command for megatrain, and as comments below it what changed, why, and what is open.

    run.sh ──> commands, exports, #SBATCH ─┐
                                           ├─> flags ─> translate ─> check ─> text
    run.yaml ──> lines ────────────────────┘

bash evaluates a shell script in a sandbox (`evaluate.py`): none of its commands runs.
"""

import argparse
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from megatrain.config import InputError, Plan, Problem
from megatrain.config.cli.flag_words import FlagWords
from megatrain.config.cli.megatron_yaml import read_megatron_yaml
from megatrain.config.plan_note import GRADES, by_grade
from megatrain.tools.port.evaluate import Command, Evaluation, evaluate
from megatrain.tools.port.launch import (
    FAMILIES,
    batch_options,
    find_launch,
    slurm_numbers,
    slurm_options,
    unused_nodes,
    world_size,
)
from megatrain.tools.port.surroundings import exported, inner_exports, other_commands, slurm_line
from megatrain.tools.port.translate import PortedFlag, Translation, check, from_script, from_yaml, translate
from megatrain.tools.port.variables import passes_arguments
from megatrain.tools.port.words import Part, Word, plain, printable, quoted
from megatrain.tools.subcommands import add_command, launcher_of

_PROGRAMS: Final = ("pretrain.py", *FAMILIES)


@dataclass(frozen=True)
class Source:
    """A script or a file as read."""

    file: str
    flags: Sequence[PortedFlag]
    exports: Sequence[str]
    """Commands before the training command."""
    wrapper: str
    """The command whose last argument is the text of the training command; usually empty."""
    launcher: str
    """Empty if the file names none."""
    world_size: int | None
    """None if the file leaves it open."""
    sections: Mapping[str, Sequence[str]]
    """Lines below the command, by title."""
    problems: Sequence[Problem]
    launch: Command | None = None
    slurm: Mapping[str, str] = field(default_factory=dict)
    """Options of #SBATCH lines."""


def add_flags(commands: Any) -> None:
    """Add `megatrain port`."""
    port = add_command(
        commands,
        "port",
        run,
        description=f"Read a launch script that runs {_of_programs()}, or a YAML file of its"
        " arguments, and print the command for megatrain, with what changed and why as comments. bash evaluates the script, and none of its commands runs. Exit code: 0 if the run would"
        " start, 1 if not.",
    )
    port.add("file SCRIPT.sh | FILE.yaml", "launch script or YAML file")
    port.add("values [NAME=VALUE ...]", "values of variables that the script leaves open")
    port.add("--world-size N", "ranks of the run (default: the ranks of the launcher)", of=int, at_least=1)


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand; return 0 if the printed command would start, and 1 if not."""
    given = dict(_pair(word) for word in arguments.values)
    is_yaml = Path(arguments.file).suffix in (".yaml", ".yml")
    source = _read_yaml(arguments.file, given) if is_yaml else _read_script(arguments.file, given)
    translation = translate(source.flags)
    plan, found, size = check(
        translation, arguments.world_size or source.world_size, shlex.quote(arguments.file)
    )
    problems = [*source.problems, *found]
    print("\n".join(_text(source, translation, plan, problems, size, arguments.world_size)))
    return 1 if problems else 0


def _pair(word: str) -> tuple[str, str]:
    name, sign, value = word.partition("=")
    if not sign or not re.fullmatch(r"\w+", name):
        raise InputError(f"{word} is not NAME=VALUE", fix="write the variables of the script as NAME=VALUE")
    return name, value


def _read_script(file: str, given: Mapping[str, str]) -> Source:
    slurm = slurm_options(_file_text(file))
    found = evaluate(file, given, slurm_numbers(slurm))
    launch, others = find_launch(found)
    if launch and launch.batch:  # its arithmetic needs the numbers of the job that it submits
        slurm = batch_options(launch, file)
        found = evaluate(file, given, slurm_numbers(slurm))
        launch, others = find_launch(found)
    if launch is None:
        ends = "".join(
            f"; {line}" for line in (*_other_programs(found), *([found.exit] if found.exit else []))
        )
        needs = "".join(f"\n  {line}" for line in (*found.uncertain, *found.not_read))
        raise InputError(
            f"{file}: no command runs a pretrain_*.py{ends}{needs}",
            fix=f"name the script with the line that launches {_of_programs()}, a .yaml file, or values that the script needs: NAME=VALUE, or 1=VALUE for its first argument",
        )
    exports, kept, not_needed = exported(launch)
    used = " ".join([*exports, *kept, *(part.text for part in _open_parts(_words(launch)))])
    environment, other = other_commands(found, used)
    flags = from_script(launch.arguments)
    added = list(_family(launch.program))
    return Source(
        file,
        [*added, *flags],
        exports,
        " ".join(map(quoted, launch.wrapper)),
        " ".join(map(quoted, launch.launcher)),
        world_size(launch, slurm),
        {
            "changed": list(_changed_program(launch.program, added)),
            "kept": [*kept, *environment],
            "left out": [*others, *dict.fromkeys(found.not_read), *not_needed, *other],
            "assumed": list(dict.fromkeys(found.assumed)),
            "not certain": list(dict.fromkeys(found.uncertain)),
            "open": list(_open_variables(found, launch)),
        },
        [*_program_problems(launch), *_lost_flags(found)],
        launch,
        slurm,
    )


def _other_programs(found: Evaluation) -> Iterator[str]:
    """Yield the Python programs that the commands of a script run with flags."""
    for command in found.commands:
        words = list(map(plain, command.words))
        name = next((word for word in words if word.endswith(".py")), None)
        if name and any(word.startswith("--") for word in words[words.index(name) :]):
            yield f"{command.place} runs {name}"


def _family(program: str) -> Iterator[PortedFlag]:
    """Yield the flag for the family that a program trains; GPT is the default."""
    family = FAMILIES.get(program.rpartition("/")[2], "gpt")
    if family != "gpt":
        yield PortedFlag(FlagWords("--model-family", (family,)), ((Part(family),),))


def _changed_program(program: str, added: Sequence[PortedFlag]) -> Iterator[str]:
    if program != "pretrain.py":
        yield f"{program} -> {' '.join(['pretrain.py', *(flag.line for flag in added)])}"


def _of_programs() -> str:
    *others, last = FAMILIES
    return f"{', '.join(others)} or {last}"


def _open_variables(found: Evaluation, launch: Command) -> Iterator[str]:
    """Yield each part of the command that stays as shell text, and why."""
    if passes_arguments(found.text) and not any(
        part.name.isdigit() for part in _open_parts(launch.arguments)
    ):
        yield f'"$@": the arguments of {found.file}: add them to the flags, or give them as 1=VALUE'
    for part in _open_parts(_words(launch)):
        text, variable = part.text.removeprefix("\\"), found.variables.get(part.name)
        if text.startswith("$("):
            yield f"{text}: no command of the script runs" + (
                f": {part.name}=VALUE gives it" if part.name else ""
            )
        elif part.name.isdigit():
            yield f"{text}: given to {found.file} as an argument"
        elif variable and variable.is_of_launcher:
            yield f"{text}: the launcher sets it"
        elif part.name == "PWD":
            yield f"{text}: the folder in which the script starts"
        else:
            yield f"{text}: not set in {found.file}"


def _words(launch: Command) -> tuple[Word, ...]:
    """Return the words that are printed for a launch."""
    exports = (*launch.exports.values(), *launch.inner_exports.values())
    return (*exports, *launch.wrapper, *launch.launcher, *launch.arguments)


def _open_parts(words: Iterable[Word]) -> list[Part]:
    """Return the parts that a shell is left to expand."""
    parts = {part.text.removeprefix("\\"): part for word in words for part in word if part.is_open}
    return list(parts.values())


def _program_problems(launch: Command) -> Iterator[Problem]:
    name = launch.program.rpartition("/")[2]
    if name not in _PROGRAMS:
        yield Problem(
            f"{launch.place}: {name} trains another model than a GPT, BERT, T5, a hybrid or a vision-language model",
            f"use a script of {_of_programs()}",
        )


def _lost_flags(found: Evaluation) -> Iterator[Problem]:
    """Yield a problem for each command whose name is a flag: the training command ends before it."""
    for command in found.commands:
        if plain(command.words[0]).startswith("-"):
            yield Problem(
                f"{command.place}: {command.text} is a command of its own, and no flag of the training command",
                "end each line of the command but the last with a backslash, without a comment or an empty line between",
            )


def _read_yaml(file: str, given: Mapping[str, str]) -> Source:
    _file_text(file)
    lines = list(read_megatron_yaml(file))
    flags = [from_yaml(line, given) for line in lines if isinstance(line, FlagWords)]
    open_parts = _open_parts(word for flag in flags if flag for word in flag.words)
    return Source(
        file,
        [flag for flag in flags if flag],
        [],
        "",
        "",
        None,
        {
            "left out": [line for line in lines if isinstance(line, str)],
            "open": [f"{part.text}: not set in {file}" for part in open_parts],
        },
        [line for line in lines if isinstance(line, Problem)],
    )


def _file_text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InputError(f"{file}: {reason}", fix="name a readable script or YAML file") from None


def _text(
    source: Source,
    translation: Translation,
    plan: Plan | None,
    problems: Sequence[Problem],
    size: int,
    given_size: int | None,
) -> Iterator[str]:
    launcher = source.launcher or launcher_of(size)
    yield from source.exports
    inner = inner_exports(source.launch) if source.launch else ""
    flags = (flag.line for flag in translation.flags)
    yield _wrapped(source.wrapper, " \\\n  ".join([f"{inner}{launcher} pretrain.py", *flags]))
    ranks = "1 rank" if size == 1 else f"{size} ranks"
    sections: dict[str, Sequence[str]] = dict(source.sections)
    if given_size is None and source.world_size is None:
        line = f"{ranks}, the smallest number for this layout: --world-size sets another"
        sections["assumed"] = [*sections.get("assumed", ()), line]
    sections["changed"] = [*sections.get("changed", ()), *translation.changed]
    sections["left out"] = [*sections.get("left out", ()), *translation.repeated]
    if source.launch:
        idle = unused_nodes(source.launch, source.slurm, size)
        sections["not certain"] = [*sections["not certain"], *idle]
        is_known = source.world_size is not None or given_size is not None
        sections["with Slurm"] = list(slurm_line(source.launch, source.slurm, size, is_known=is_known))
    notes = by_grade((*translation.ignored, *(plan.notes if plan else ())))
    sections |= {GRADES[grade]: those for grade, those in notes.items()}
    for title, lines in sections.items():
        if lines:
            yield f"#\n# {title}"
            yield from (f"#   {printable(line)}" for line in lines)
    yield "#"
    if not problems:
        yield f"# It starts on {ranks}, if its files can be read: checked for GPUs with Transformer Engine."
        yield (
            f"# --dry-run --world-size {size} prints its memory and ranks; without the data and the tokenizer,"
            " --mock-data --vocab-size N take the place of their flags."
        )
        return
    yield f"# It does not start on {ranks}:"
    for number, problem in enumerate(problems, 1):
        yield f"#   {number}. {problem}".replace("\n", "\n#    ")


def _wrapped(wrapper: str, command: str) -> str:
    """Return the command as the text of `sh -c`, where it keeps its own quotes and variables."""
    if not wrapper:
        return command
    text = re.sub(r'(["`])', r"\\\1", command)
    return f'{wrapper} "{text}"'
