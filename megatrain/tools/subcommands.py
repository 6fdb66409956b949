"""Parts that several subcommands share: how they are declared, texts of their flags, and durations."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, Final

RUN_FOLDER: Final = "--save folder of a run, or one of its iter_NNNNNNN folders"
RUN_FLAGS: Final = (
    "FLAGS are the flags of pretrain.py, including --config; see `python pretrain.py --help`. It needs neither GPUs nor"
    " other ranks."
)


def add_command(
    commands: Any,
    name: str,
    *,
    run: Callable[[argparse.Namespace], int] | None = None,
    takes_run_flags: bool = False,
    **texts: str,
) -> argparse.ArgumentParser:
    """Add a subcommand; return its parser.

    Args:
        commands: the subparsers of the command above it.
        run: runs it and returns the exit code; None: it has subcommands.
        takes_run_flags: it accepts the flags of pretrain.py too.
        texts: `help`, `description` and `usage`.
    """
    command: argparse.ArgumentParser = commands.add_parser(name, allow_abbrev=False, **texts)
    command.set_defaults(parser=command, run=run, takes_run_flags=takes_run_flags)
    return command


def add_commands(
    commands: Any, texts: Mapping[Callable[[argparse.Namespace], int], str]
) -> dict[str, argparse.ArgumentParser]:
    """Add a subcommand for each function, named after it, with its help text; return the parsers by name."""
    return {
        (name := run.__name__.replace("_", "-")): add_command(
            commands, name, run=run, help=text, description=f"{text[0].upper()}{text[1:]}."
        )
        for run, text in texts.items()
    }


def add_file_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of safetensors files."""
    parser.add_argument(
        "--dtype",
        choices=("stored", "fp32", "bf16", "fp16"),
        default="stored",
        help="dtype (default: as stored)",
    )
    parser.add_argument(
        "--max-file-gb", type=float, default=5.0, metavar="GB", help="size limit of a file (default: 5)"
    )


def duration(seconds: float) -> str:
    """Return a duration in its two largest units, such as `3 h 20 min`."""
    whole = round(seconds)
    units = [("d", whole // 86400), ("h", whole // 3600 % 24), ("min", whole // 60 % 60), ("s", whole % 60)]
    first = next((at for at, (_, count) in enumerate(units) if count), len(units) - 1)
    return " ".join(f"{count} {unit}" for unit, count in units[first : first + 2] if count) or "0 s"


def at_least_one(text: str) -> int:
    """Return a whole number of 1 or more, the type of an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number of 1 or more")
    return int(text)
