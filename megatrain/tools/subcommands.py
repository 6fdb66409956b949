"""Parts that several subcommands share: how they and their flags are declared, texts of their flags, files of --output, durations and launch lines."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from megatrain.config.cli.parse_value import BadValueError, load_value
from megatrain.config.environment import DEFAULT_PORT
from megatrain.config.errors import ConfigError
from megatrain.config.schema.tree import Setting, closest_name
from megatrain.config.schema.values import Range

UNKNOWN: Final = "unrecognized arguments"
RUN_FOLDER: Final = "--save folder of a run, or one of its iter_NNNNNNN folders"
RUN_FLAGS: Final = (
    "FLAGS are the flags of pretrain.py, including --config; see `python pretrain.py --help`. It needs neither GPUs nor"
    " other ranks."
)


class CommandParser(argparse.ArgumentParser):
    """A parser that raises megatrain's errors, and whose flags are declared in the form in which help shows them."""

    def error(self, message: str) -> NoReturn:
        unknown = [word for word in message.split() if word.startswith("--")] if UNKNOWN in message else []
        known = [flag for action in self._actions for flag in action.option_strings]
        near = next((closest_name(word, known) for word in unknown), None)
        raise ConfigError(message, fix=f"did you mean {near}?" if near else f"see `{self.prog} --help`")

    def add(
        self,
        form: str,
        text: str,
        default: Any = None,
        *,
        of: type | None = None,
        choices: Sequence[str] | None = None,
        required: bool = False,
        at_least: float | None = None,
        above: float | None = None,
        at_most: float | None = None,
        group: Any = None,
    ) -> None:
        """Add a flag, or an argument without a name.

        Args:
            form: as help shows it: `--json`, `--top N`, `--layouts WORD ...`, `runs RUN ...`, `values [VALUE ...]`.
            text: help text. The default is added to it, unless it names one.
            default: also says the type of the values.
            of: type of the values if there is no default; None: text.
            at_least, above, at_most: bounds of a number.
            group: flags that exclude one another.
        """
        name, _, value = form.partition(" ")
        to = self if group is None else group
        if not value and choices is None and default is None:
            to.add_argument(name, action="store_true", help=text)
            return
        metavar = value.strip("[]").removesuffix(" ...")
        more: dict[str, Any] = {"required": True} if required else {}
        if metavar != value:
            more["nargs"] = "*" if value.startswith("[") else "+"
        if default not in (None, ()) and "default" not in text:
            values = default if isinstance(default, tuple) else (default,)
            text += f" (default: {' '.join(str(one).removesuffix('.0') for one in values)})"
        kind: Any = of or (str if default is None or "nargs" in more else type(default))
        if kind in (int, float):
            kind = _number(name, kind, Range(at_least=at_least, above=above, at_most=at_most))
        to.add_argument(
            name, metavar=metavar or None, type=kind, default=default, choices=choices, help=text, **more
        )


def _number(flag: str, kind: type[int | float], bounds: Range) -> Callable[[str], float]:
    """Return the function that reads a number, as pretrain.py reads those of its flags."""
    setting = Setting(
        section="tools",
        name=flag.removeprefix("--").replace("-", "_"),
        kind=kind,
        choices=(),
        is_list=False,
        is_optional=False,
        default=None,
        range=bounds,
    )

    def number(text: str) -> float:
        try:
            found: float = load_value(setting, text)
        except BadValueError as error:
            raise ConfigError(f"{flag} {text} {error.text}", fix=error.fix) from None
        return found

    return number


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int | None] | None = None,
    *,
    takes_run_flags: bool = False,
    **texts: str,
) -> CommandParser:
    """Add a subcommand; return its parser.

    Args:
        commands: the subparsers of the command above it.
        run: runs it and returns the exit code, or None for 0; its docstring describes it. None: it has subcommands.
        takes_run_flags: it accepts the flags of pretrain.py too.
        texts: `help`, `description` and `usage`.
    """
    about = "" if run is None else (run.__doc__ or "").partition("\n\n")[0].strip()
    if about:
        texts.setdefault("help", about[0].lower() + about[1:].removesuffix("."))
        texts.setdefault(
            "description", f"{about} {RUN_FLAGS}" if takes_run_flags and "FLAGS are" not in about else about
        )
    command: CommandParser = commands.add_parser(name, allow_abbrev=False, **texts)
    command.set_defaults(parser=command, run=run, takes_run_flags=takes_run_flags)
    return command


def add_file_options(parser: CommandParser) -> None:
    """Add the flags of safetensors files."""
    parser.add("--dtype", "dtype (default: as stored)", "stored", choices=("stored", "fp32", "bf16", "fp16"))
    parser.add("--max-file-gb GB", "size limit of a file", 5.0, above=0)


def write_output(path: Path, text: str) -> None:
    """Write the file of --output. Raises ConfigError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--output {path}: {error.strerror or error}", fix="name a file in a folder that can be written"
        ) from error


def duration(seconds: float) -> str:
    """Return a duration in its two largest units, such as `3 h 20 min`."""
    whole = round(seconds)
    units = [("d", whole // 86400), ("h", whole // 3600 % 24), ("min", whole // 60 % 60), ("s", whole % 60)]
    first = next((at for at, (_, count) in enumerate(units) if count), len(units) - 1)
    return " ".join(f"{count} {unit}" for unit, count in units[first : first + 2] if count) or "0 s"


def launcher_of(ranks: int, most_of_node: int = 8) -> str:
    """Return the words before pretrain.py that start some ranks, as many on each node."""
    nodes = next(n for n in range(-(-ranks // most_of_node), ranks + 1) if ranks % n == 0)
    if ranks == 1:
        return "python"
    if nodes == 1:
        return f"torchrun --standalone --nproc-per-node {ranks}"
    where = f"--rdzv-backend c10d --rdzv-endpoint HOST:{DEFAULT_PORT}"
    return f"torchrun --nnodes {nodes} --nproc-per-node {ranks // nodes} {where}"
