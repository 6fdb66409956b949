"""The `megatrain` command: finds the subcommand of a command line and runs it.

The flags of a subcommand are declared in its folder, in modules that do not import torch; torch is imported by the subcommand
that runs and needs it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from megatrain import __version__
from megatrain.config.cli.help_text import field_help
from megatrain.config.errors import Problem, is_unicode
from megatrain.config.schema.tree import closest_name
from megatrain.process.exit_deadline import run_program
from megatrain.process.streams import StandardStreams
from megatrain.tools import convert_flags, report, trace, watch
from megatrain.tools.checkpoint import flags as checkpoint_flags
from megatrain.tools.data import flags as data_flags
from megatrain.tools.doctor import flags as doctor_flags
from megatrain.tools.generation import flags as generation_flags
from megatrain.tools.parity import flags as parity_flags
from megatrain.tools.plan import flags as plan_flags
from megatrain.tools.port import cli as port


class _Parser(argparse.ArgumentParser):
    """A parser whose errors have megatrain's form: the problem, then a fix."""

    def error(self, message: str) -> None:  # type: ignore[override]
        unknown = [word for word in message.split() if word.startswith("--")] if _UNKNOWN in message else []
        known = [flag for action in self._actions for flag in action.option_strings]
        near = next((closest_name(word, known) for word in unknown), None)
        fix = f"did you mean {near}?" if near else f"see `{self.prog} --help`"
        print(f"error: {Problem(message, fix)}", file=sys.stderr)
        sys.exit(2)


_UNKNOWN = "unrecognized arguments"
_MODULES = {
    "checkpoint": "megatrain.tools.checkpoint.cli",
    "convert": "megatrain.tools.convert",
    "data": "megatrain.tools.data.cli",
    "doctor": "megatrain.tools.doctor.cli",
    "generate": "megatrain.tools.generation.generate",
    "parity": "megatrain.tools.parity.cli",
    "port": "megatrain.tools.port.cli",
    "plan": "megatrain.tools.plan.cli",
    "report": "megatrain.tools.report",
    "serve": "megatrain.tools.generation.serve",
    "trace": "megatrain.tools.trace",
    "watch": "megatrain.tools.watch",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; return its exit code. It ends, quietly, if its output is closed."""
    try:
        with StandardStreams(ends_program=True):
            return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(argv: Sequence[str]) -> int:
    words = plan_flags.with_action(argv)
    for word in words:
        if not is_unicode(word):
            _Parser(prog="megatrain").error(f"{word!r} is not UTF-8")
    arguments, others = _parser(with_help=bool({"-h", "--help"} & set(words))).parse_known_args(words)
    if others and not arguments.takes_run_flags:
        arguments.parser.error(f"{_UNKNOWN}: {' '.join(others)}")
    arguments.run_flags = others
    module = import_module(_MODULES[arguments.command])
    from megatrain.training.launch.ranks import report_errors  # noqa: PLC0415 (imports torch)

    return report_errors(lambda: module.run(arguments))


def program() -> NoReturn:
    """Run the command `megatrain`."""
    run_program(main)


def _parser(*, with_help: bool = False) -> argparse.ArgumentParser:
    """Return the parser of all subcommands.

    Each subcommand sets `parser`, its own parser, and `takes_run_flags`, whether it accepts the flags of pretrain.py.
    """
    parser = _Parser(prog="megatrain", description="Tools around pretrain.py.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"megatrain {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    checkpoint_flags.add_flags(commands)
    convert_flags.add_flags(commands)
    parity_flags.add_flags(commands)
    port.add_flags(commands)
    plan_flags.add_flags(commands)
    doctor_flags.add_flags(commands)
    report.add_flags(commands)
    watch.add_flags(commands)
    generation_flags.add_flags(commands)
    trace.add_flags(commands)
    data_flags.add_flags(commands, field_help() if with_help else {})
    return parser


if __name__ == "__main__":
    program()
