"""The `megatrain` command and its subcommands. torch is imported by the subcommand that needs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from megatrain import __version__
from megatrain.config.cli.help_text import field_help
from megatrain.config.errors import Problem
from megatrain.config.schema.tree import near_name, settings


class _Parser(argparse.ArgumentParser):
    """Errors as everywhere in megatrain: what is wrong, then what to do."""

    def error(self, message: str) -> None:  # type: ignore[override]
        unknown = [word for word in message.split() if word.startswith("--")] if _UNKNOWN in message else []
        known = [flag for action in self._actions for flag in action.option_strings]
        near = next((near_name(word, known) for word in unknown), None)
        fix = f"did you mean {near}?" if near else f"see `{self.prog} --help`"
        print(f"error: {Problem(message, fix)}", file=sys.stderr)
        sys.exit(2)


_UNKNOWN = "unrecognized arguments"
_MODULES = {
    "data": "megatrain.tools.data.cli",
    "generate": "megatrain.tools.generate",
    "parity": "megatrain.tools.parity.cli",
    "report": "megatrain.tools.report",
    "trace": "megatrain.tools.trace",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    arguments, others = _parser(with_help=bool({"-h", "--help"} & set(words))).parse_known_args(words)
    if others and not arguments.takes_run_flags:
        arguments.parser.error(f"{_UNKNOWN}: {' '.join(others)}")
    arguments.run_flags = others
    module = import_module(_MODULES[arguments.command])
    from megatrain.training.launch.ranks import report_errors  # noqa: PLC0415 (imports torch)

    return report_errors(lambda: module.run(arguments))


def _parser(*, with_help: bool = False) -> argparse.ArgumentParser:
    """All subcommands. Of each, `parser` is its own, and `takes_run_flags` whether those of pretrain.py go with it."""
    parser = _Parser(prog="megatrain", description="Tools around pretrain.py.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"megatrain {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    _add_parity(commands)
    generate = _command(
        commands,
        "generate",
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
    _add_report(commands)
    trace = _command(
        commands,
        "trace",
        help="the table of a profile's trace",
        description="Print where the time went in a trace of --profile, as the run does for rank 0.",
    )
    trace.add_argument("file", metavar="FILE", help="trace that --profile wrote, such as rank1.json.gz")
    _add_data(commands, field_help() if with_help else {})
    return parser


def _add_parity(commands: Any) -> None:
    parity = _command(
        commands,
        "parity",
        help="prove that every parallel layout computes what one process computes",
        description="Train tiny models under each layout and compare losses, gradients and weights with one process."
        " Without flags: every pair of options' values in one row at least, in fp64, and some rows in fp32, bf16 and fp16.",
    )
    parity.add_argument(
        "--layouts",
        nargs="+",
        default=[],
        metavar="WORD",
        help="only rows with all of these words, such as `tp2 sp`, or where no row has them that layout itself (default: all)",
    )
    which = parity.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="the 32 rows in which most pairs meet, in fp64")
    which.add_argument("--full", action="store_true", help="every combination of many options: hours")
    which.add_argument(
        "--self-test", action="store_true", help="plant known faults instead, which must be found"
    )
    parity.add_argument("--slice", metavar="I/N", help="only every Nth row, from the Ith on")
    parity.add_argument(
        "--results",
        metavar="FILE",
        help="note rows there, and leave out those that have passed by it, with the same code",
    )
    parity.add_argument(
        "--precision", choices=("fp64", "fp32", "bf16", "fp16"), help="all rows in this precision"
    )
    parity.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where to compute; a rank on each GPU (default: cpu)",
    )
    parity.add_argument(
        "--transformer-impl",
        choices=("local", "transformer_engine"),
        default="local",
        help="whose parts of layers rows are computed with, those that they can be; in bf16 against `local` (default: local)",
    )


def _add_report(commands: Any) -> None:
    report = _command(
        commands,
        "report",
        help="the curves of runs as one HTML page",
        description="Write one HTML page with the curves, evaluations and settings of runs. It needs a browser and no network.",
    )
    report.add_argument(
        "runs", nargs="+", metavar="RUN", help="folder that --save of pretrain.py named, or a metrics file"
    )
    report.add_argument(
        "--output", default="report.html", metavar="FILE", help="page to write (default: report.html)"
    )


def _command(
    commands: Any, name: str, *, takes_run_flags: bool = False, **texts: str
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, allow_abbrev=False, **texts)
    command.set_defaults(parser=command, takes_run_flags=takes_run_flags)
    return command


def _add_data(commands: Any, texts: Mapping[str, str]) -> None:
    """`megatrain data ...`. `texts`: of the settings, only needed where help is printed."""
    data = _command(
        commands,
        "data",
        help="look into datasets, show samples, build index caches, merge datasets",
        description="Datasets are named by their prefix: the path without .bin and .idx.",
    )
    actions = data.add_subparsers(dest="action", required=True, metavar="ACTION")

    inspect = _command(
        actions,
        "inspect",
        help="what a dataset holds, and whether its description agrees",
        description="Count what a dataset holds, and hold it against its description PREFIX.json.",
    )
    inspect.add_argument("prefix", metavar="PREFIX", help="path without .bin and .idx")
    inspect.add_argument("--document", type=int, metavar="K", help="show document K, from 0 on")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    _add_tokenizer(inspect, texts)

    sample = _command(
        actions,
        "sample",
        takes_run_flags=True,
        help="one sample, exactly as training sees it",
        usage="%(prog)s FLAGS --of {train,valid,test} --index K [--set NAME] [--world-size N] [--json]",
        description=f"Show one sample of a run. {_RUN_FLAGS}",
    )
    sample.add_argument("--of", required=True, choices=("train", "valid", "test"), help="the split")
    sample.add_argument(
        "--index", required=True, type=int, metavar="K", help="number of the sample, from 0 on"
    )
    sample.add_argument("--set", metavar="NAME", help="of --multiple-validation-sets, this one")
    sample.add_argument("--json", action="store_true", help="print one JSON object")

    index = _command(
        actions,
        "index",
        takes_run_flags=True,
        help="build the index caches of a run beforehand",
        usage="%(prog)s FLAGS [--world-size N]",
        description=f"Build the sample indices of a run where it will look for them. {_RUN_FLAGS}",
    )
    for parser in (sample, index):
        parser.add_argument(
            "--world-size",
            type=int,
            metavar="N",
            help="ranks of the run (default: as many as hold the model once); only without --global-batch-size does"
            " the order of samples depend on it",
        )

    merge = _command(
        actions,
        "merge",
        help="join datasets into one",
        description="Write one dataset that holds the documents of several, in the order in which they are named.",
    )
    merge.add_argument("prefixes", nargs="+", metavar="PREFIX", help="paths without .bin and .idx")
    merge.add_argument("--output-prefix", required=True, metavar="OUT", help="path of the new dataset")


_RUN_FLAGS = (
    "FLAGS are those of pretrain.py (--config, too), see `python pretrain.py --help`. Neither GPUs nor other"
    " ranks are needed."
)


def _add_tokenizer(parser: argparse.ArgumentParser, texts: Mapping[str, str]) -> None:
    """The flags of a tokenizer, whose values are stored by path, as text."""
    group = parser.add_argument_group("tokenizer", "to decode a document, and to know what ends one")
    for setting in settings():
        if setting.section != "tokenizer":
            continue
        text = texts.get(setting.path, "").replace("%", "%%")
        if setting.kind is bool:
            group.add_argument(setting.flag, dest=setting.path, action="store_const", const="true", help=text)
            group.add_argument(
                setting.opposite_flag,
                dest=setting.path,
                action="store_const",
                const="false",
                help=argparse.SUPPRESS if not setting.default else f"turn {setting.flag} off",
            )
        else:
            metavar = "{" + ",".join(setting.choices) + "}" if setting.choices else setting.name.upper()
            nargs = "+" if setting.is_list else None
            group.add_argument(setting.flag, dest=setting.path, metavar=metavar, nargs=nargs, help=text)


if __name__ == "__main__":
    sys.exit(main())
