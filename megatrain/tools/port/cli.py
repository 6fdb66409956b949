"""`megatrain port`: print the command for megatrain, and as comments below it what changed, why, and what is open.

    run.sh ──> commands, variables ─┐
                                    ├─> flags ─> translate ─> check ─> text
    run.yaml ──> lines ─────────────┘

A shell script is read, not executed.
"""

import argparse
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megatrain.config import InputError, Plan, Problem
from megatrain.config.cli.flag_words import FlagWords
from megatrain.config.cli.megatron_yaml import read_megatron_yaml
from megatrain.tools.port.launch import FAMILIES, Launch, find_launch, world_size
from megatrain.tools.port.shell_script import Part, ShellScript, Word, quoted
from megatrain.tools.port.translate import PortedFlag, Translation, check, from_script, from_yaml, translate
from megatrain.tools.subcommands import add_command

_PROGRAMS: Final = ("pretrain.py", *FAMILIES)
_NODE: Final = 8
"""GPUs of a node in the launcher that a YAML file gets."""


@dataclass(frozen=True)
class Source:
    """A script or a file as read."""

    file: str
    flags: Sequence[PortedFlag]
    wrapper: str
    """The command whose last argument is the text of the training command; usually empty."""
    launcher: str
    """Empty if the file names none."""
    world_size: int | None
    """None if the file leaves it open."""
    changed: Sequence[str]
    left_out: Sequence[str]
    open: Sequence[str]
    assumed: Sequence[str]
    problems: Sequence[Problem]


def add_flags(commands: Any) -> None:
    """Add `megatrain port`."""
    port = add_command(
        commands,
        "port",
        run=run,
        description=f"Read a launch script that runs {_of_programs()}, or a YAML file of its"
        " arguments, and print the command for megatrain, with what changed and why as comments. The script is not executed. Exit code: 0 if the run would"
        " start, 1 if not.",
    )
    port.add_argument("file", metavar="SCRIPT.sh | FILE.yaml", help="launch script or YAML file")
    port.add_argument(
        "values", nargs="*", metavar="NAME=VALUE", help="values of variables that the script leaves open"
    )
    port.add_argument(
        "--world-size", type=int, metavar="N", help="ranks of the run (default: the ranks of the launcher)"
    )


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
    text = _file_text(file)
    script = ShellScript(file, given)
    launch = find_launch(script, text)
    if launch is None:
        raise InputError(
            f"{file}: no command runs a pretrain_*.py",
            fix=f"name the script with the line that launches {_of_programs()}, or a .yaml file",
        )
    return Source(
        file,
        [*_family(launch.program), *from_script(launch.arguments)],
        " ".join(map(quoted, launch.wrapper)),
        " ".join(map(quoted, launch.launcher)),
        world_size(launch, text),
        list(_changed_program(launch.program)),
        [*launch.notes, *script.not_read],
        list(_open_variables(script, launch)),
        list(script.assumed.values()),
        list(_program_problems(file, launch)),
    )


def _family(program: str) -> Iterator[PortedFlag]:
    """Yield the flag for the family that a program trains; GPT is the default."""
    family = FAMILIES.get(program.rpartition("/")[2], "gpt")
    if family != "gpt":
        yield PortedFlag(FlagWords("--model-family", (family,)), ((Part(family),),))


def _changed_program(program: str) -> Iterator[str]:
    family = "".join(f" {flag.line}" for flag in _family(program))
    if program != "pretrain.py":
        yield f"{program} -> pretrain.py{family}"


def _of_programs() -> str:
    *others, last = FAMILIES
    return f"{', '.join(others)} or {last}"


def _open_variables(script: ShellScript, launch: Launch) -> Iterator[str]:
    """Name each part of the command that stays as the script writes it, with the assignment of its variable."""
    for text in _open_parts((*launch.wrapper, *launch.launcher, *launch.arguments)):
        name = re.sub(r"\W", "", text)
        if text.startswith(("$(", "`")):
            yield f"{text}: commands in the script are not executed"
        elif name.isdigit() or not name:
            yield f"{text}: given to {script.file} as an argument"
        else:
            yield f"{text}: {script.open.get(name, f'not set in {script.file}')}"


def _open_parts(words: Iterable[Word]) -> list[str]:
    """Return the texts that the shell is left to expand, without texts of one escaped sign."""
    texts = (part.text.removeprefix("\\") for word in words for part in word if part.is_open)
    return [text for text in dict.fromkeys(texts) if text != "$"]


def _program_problems(file: str, launch: Launch) -> Iterator[Problem]:
    name = launch.program.rpartition("/")[2]
    if name not in _PROGRAMS:
        yield Problem(
            f"{file}:{launch.line}: {name} trains another model than a GPT, BERT, T5, a hybrid or a vision-language model",
            f"use a script of {_of_programs()}",
        )


def _read_yaml(file: str, given: Mapping[str, str]) -> Source:
    _file_text(file)
    lines = list(read_megatron_yaml(file))
    flags = [from_yaml(line, given) for line in lines if isinstance(line, FlagWords)]
    return Source(
        file,
        [flag for flag in flags if flag],
        "",
        "",
        None,
        [],
        [line for line in lines if isinstance(line, str)],
        [
            f"{part}: not set in {file}"
            for part in _open_parts(word for flag in flags if flag for word in flag.words)
        ],
        [],
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
    launcher = source.launcher or _launcher(size)
    yield _wrapped(
        source.wrapper,
        " \\\n  ".join([f"{launcher} pretrain.py", *(flag.line for flag in translation.flags)]),
    )
    ranks = "1 rank" if size == 1 else f"{size} ranks"
    assumed = list(source.assumed)
    if given_size is None and source.world_size is None:
        assumed.append(f"{ranks}, the smallest number for this layout: --world-size sets another")
    sections = {
        "changed": [*source.changed, *translation.changed],
        "left out": [*source.left_out, *translation.left_out],
        "assumed": assumed,
        "open": source.open,
        "notes of the plan": plan.notes if plan else (),
    }
    for title, lines in sections.items():
        if lines:
            yield f"#\n# {title}"
            yield from (f"#   {line}" for line in lines)
    yield "#"
    if not problems:
        yield f"# It starts on {ranks}, if its files can be read: checked for GPUs with Transformer Engine."
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


def _launcher(size: int) -> str:
    if size <= _NODE:
        return "python" if size == 1 else f"torchrun --nproc-per-node {size}"
    return f"torchrun --nnodes {-(-size // _NODE)} --nproc-per-node {_NODE}"
