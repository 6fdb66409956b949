"""The `megatrain` command and its subcommands. torch is imported by the subcommand that needs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from megatrain import __version__
from megatrain.config.errors import Problem
from megatrain.config.tree import near_name


class _Parser(argparse.ArgumentParser):
    """Errors as everywhere in megatrain: what is wrong, then what to do."""

    def error(self, message: str) -> None:  # type: ignore[override]
        if "required" in message:
            print(f"error: {Problem(message, f'see `{self.prog} --help`')}", file=sys.stderr)
            sys.exit(2)
        words = message.split()
        known = [flag for action in self._actions for flag in action.option_strings]
        near = next((near_name(word, known) for word in words if word.startswith("--")), None)
        fix = f"did you mean {near}?" if near else f"see `{self.prog} --help`"
        print(f"error: {Problem(message, fix)}", file=sys.stderr)
        sys.exit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns its exit code."""
    arguments = _parser().parse_args(argv)
    module = import_module(f"megatrain.tools.{arguments.command}")
    from megatrain.training.launch import report_errors  # noqa: PLC0415 (imports torch)

    return report_errors(lambda: module.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="megatrain", description="Tools around pretrain.py.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"megatrain {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    parity = commands.add_parser(
        "parity",
        allow_abbrev=False,
        help="prove that every parallel layout computes what one process computes",
        description="Train a tiny model in fp64 under each layout and compare losses, gradients and weights.",
    )
    parity.add_argument(
        "--layouts",
        nargs="+",
        default=[],
        metavar="WORD",
        help="only layouts with all of these words, such as `tp2 sp` (default: all)",
    )
    parity.add_argument(
        "--self-test", action="store_true", help="plant known faults instead, which must be found"
    )

    generate = commands.add_parser(
        "generate",
        allow_abbrev=False,
        help="continue a prompt with a checkpoint's model",
        description="Load the newest valid checkpoint and continue a prompt.",
    )
    generate.add_argument(
        "--load", required=True, metavar="FOLDER", help="folder that --save of pretrain.py named"
    )
    generate.add_argument("--prompt", required=True, help="text to continue")
    generate.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="at most so many (default: 64)"
    )
    generate.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0: the likeliest (default: 0.8)"
    )
    generate.add_argument(
        "--top-k", type=int, default=40, metavar="K", help="draw among the K likeliest (default: 40)"
    )
    generate.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
