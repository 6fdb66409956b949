"""The `megatrain` command: finds the subcommand of a command line and runs it.

Only the module of that subcommand is imported, so that `megatrain --help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final, NoReturn

from megatrain import __version__
from megatrain.config.errors import ConfigError, describe, is_unicode
from megatrain.process.exit_deadline import run_program
from megatrain.process.streams import StandardStreams
from megatrain.tools.subcommands import UNKNOWN, CommandParser

COMMANDS: Final = {
    "cache-logits": ("cache_logits", "write the outputs of a teacher for the samples of a run"),
    "prune": ("prune.cli", "write a smaller model of the parts of a trained one that matter most"),
    "checkpoint": ("checkpoint.cli", "list, verify, inspect, compare, remove and rewrite checkpoints"),
    "convert": ("convert", "convert checkpoints of other programs, and to checkpoints of transformers"),
    "parity": ("parity.cli", "check that every parallel layout computes the same as one process"),
    "port": ("port.cli", "print the command for a launch script or a YAML file of Megatron-LM"),
    "plan": ("plan.cli", "find the best layout of a run, or the best pipeline schedule for given times"),
    "doctor": ("doctor.cli", "check hosts, GPUs, disks and network before a run"),
    "quantize": ("quantization.cli", "write a checkpoint as a folder of transformers with quantized weights"),
    "ladder": ("ladder.cli", "write small runs of a model, and predict its loss by a scaling law"),
    "report": ("report", "write the curves of runs as one HTML page"),
    "watch": ("watch", "show the state of runs in a terminal"),
    "alerts": (
        "alerts",
        "report NaN, spikes, silence, missing saves and ends of runs to a webhook or Prometheus",
    ),
    "generate": ("generation.generate", "generate text from a checkpoint"),
    "evaluate": ("generation.evaluate", "score multiple choice and cloze tasks with a checkpoint"),
    "serve": ("generation.serve", "serve completions of a checkpoint over HTTP"),
    "trace": ("trace", "print the table of a profiler trace"),
    "settings": ("settings", "print all settings, or the differences from Megatron-LM's flags"),
    "tokenizer": ("tokenizer", "train a tokenizer on text, or compare tokenizers"),
    "data": ("data.cli", "inspect datasets, show samples, build index caches, merge datasets"),
}
"""The module of each subcommand below megatrain.tools, with `add_flags`, and its line of help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; return its exit code. It ends, quietly, if its output is closed."""
    try:
        with StandardStreams(ends_program=True):
            return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(argv: Sequence[str]) -> int:
    words = _with_action(argv)
    try:
        found = parser(next((word for word in words if not word.startswith("-")), ""))
        for word in argv:
            if not is_unicode(word):
                found.error(f"{word!r} is not UTF-8")
        arguments, others = found.parse_known_args(words)
        if others and not arguments.takes_run_flags:
            arguments.parser.error(f"{UNKNOWN}: {' '.join(others)}")
    except ConfigError as error:
        print(describe(error), file=sys.stderr)
        return error.exit_code
    arguments.run_flags = others
    from megatrain.training.launch.ranks import report_errors  # noqa: PLC0415 (imports torch)

    return report_errors(lambda: arguments.run(arguments) or 0)


def _with_action(words: Sequence[str]) -> Sequence[str]:
    """Return the words of a command line with the action `layouts` if it is `megatrain plan` without an action.

    argparse has no default for subcommands, and would read the value of a run's flag as the action.
    """
    if list(words[:1]) == ["plan"] and len(words) > 1 and words[1].startswith("--") and words[1] != "--help":
        return ["plan", "layouts", *words[1:]]
    return words


def program() -> NoReturn:
    """Run the command `megatrain`."""
    run_program(main)


def parser(command: str = "") -> CommandParser:
    """Return the parser of a subcommand; of any other word, the one that lists all subcommands.

    A subcommand sets `parser`, its own parser, `run`, the function that runs it, and `takes_run_flags`, whether it accepts the
    flags of pretrain.py.
    """
    found = CommandParser(prog="megatrain", description="Tools around pretrain.py.", allow_abbrev=False)
    found.add_argument("--version", action="version", version=f"megatrain {__version__}")
    commands = found.add_subparsers(dest="command", required=True, metavar="COMMAND")
    if command in COMMANDS:
        import_module(f"megatrain.tools.{COMMANDS[command][0]}").add_flags(commands)
    else:
        for name, (_, text) in COMMANDS.items():
            commands.add_parser(name, help=text)
    return found


if __name__ == "__main__":
    program()
