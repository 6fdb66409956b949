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
from megatrain.config.schema.tree import closest_name, settings
from megatrain.tools.generation.flags import add_generate_flags, add_serve_flags


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
_RUN_FOLDER = "--save folder of a run, or one of its iter_NNNNNNN folders"
_MODULES = {
    "checkpoint": "megatrain.tools.checkpoint.cli",
    "convert": "megatrain.tools.convert",
    "data": "megatrain.tools.data.cli",
    "generate": "megatrain.tools.generation.generate",
    "parity": "megatrain.tools.parity.cli",
    "port": "megatrain.tools.port.cli",
    "plan": "megatrain.tools.plan.pipeline",
    "report": "megatrain.tools.report",
    "serve": "megatrain.tools.generation.serve",
    "trace": "megatrain.tools.trace",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    arguments, others = _parser(with_help=bool({"-h", "--help"} & set(words))).parse_known_args(words)
    if others and not arguments.takes_run_flags:
        arguments.parser.error(f"{_UNKNOWN}: {' '.join(others)}")
    arguments.run_flags = others
    module = import_module(_MODULES[arguments.command])
    from megatrain.training.launch.ranks import report_errors  # noqa: PLC0415 (imports torch)

    return report_errors(lambda: module.run(arguments))


def _parser(*, with_help: bool = False) -> argparse.ArgumentParser:
    """Return the parser of all subcommands.

    Each subcommand sets `parser`, its own parser, and `takes_run_flags`, whether it accepts the flags of pretrain.py.
    """
    parser = _Parser(prog="megatrain", description="Tools around pretrain.py.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"megatrain {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    _add_checkpoint(commands)
    _add_convert(commands)
    _add_parity(commands)
    _add_port(commands)
    generate = _command(
        commands,
        "generate",
        help="generate text from a checkpoint",
        description="Load the newest valid checkpoint, or a folder of transformers, and continue prompts.",
    )
    add_generate_flags(generate)
    _add_plan(commands)
    _add_report(commands)
    serve = _command(
        commands,
        "serve",
        help="serve completions of a checkpoint over HTTP",
        description="Answer requests of OpenAI's completions API (POST /v1/completions) with the model of a checkpoint.",
    )
    add_serve_flags(serve)
    trace = _command(
        commands,
        "trace",
        help="print the table of a profiler trace",
        description="Print compute, exposed communication and idle time of a trace of --profile, as the run does for rank 0.",
    )
    trace.add_argument("file", metavar="FILE", help="trace that --profile wrote, such as rank1.json.gz")
    _add_data(commands, field_help() if with_help else {})
    return parser


def _add_plan(commands: Any) -> None:
    plan = _command(
        commands,
        "plan",
        help="find the best pipeline schedule and split for given times",
        description="Simulate every pipeline schedule and split of the layers; print a table, the fastest first.",
    )
    plan.add_argument("what", choices=("pipeline",), help="pipeline: schedules and splits")
    plan.add_argument("--ranks", type=int, required=True, metavar="P", help="pipeline ranks")
    plan.add_argument("--layers", type=int, required=True, metavar="L", help="layers of the model")
    plan.add_argument("--microbatches", type=int, required=True, metavar="M", help="micro-batches of a step")
    times = {
        "--forward": (1.0, "time of a layer's forward pass"),
        "--backward": (1.0, "time of the gradients of a layer's input"),
        "--weight-gradient": (1.0, "time of a layer's weight gradients"),
        "--head": (0.0, "cost of the head, as a multiple of a layer's"),
        "--transfer": (0.0, "time of a message between ranks"),
        "--combined": (
            1.0,
            "time of a combined pass of dualpipe-v, as a fraction of its forward and backward pass",
        ),
    }
    for flag, (default, text) in times.items():
        plan.add_argument(
            flag, type=float, default=default, metavar="T", help=f"{text} (default: {default:g})"
        )
    plan.add_argument(
        "--schedule", metavar="NAME", help="only this value of --pipeline-schedule (default: all)"
    )
    plan.add_argument("--output", metavar="FILE", help="SVG file for the timeline of the fastest")


def _add_checkpoint(commands: Any) -> None:
    """Add `megatrain checkpoint ...`."""
    checkpoint = _command(
        commands,
        "checkpoint",
        help="list, verify, inspect, compare, remove and rewrite checkpoints",
        description="Work with checkpoints, without a GPU. PATH is the --save folder of a run, which stands for its newest"
        " valid checkpoint, or one of its iter_NNNNNNN folders.",
    )
    actions = checkpoint.add_subparsers(dest="action", required=True, metavar="ACTION")
    texts = {
        "ls": "list the checkpoints of a folder: committed, partial or damaged",
        "verify": "read all data and compare it with the checksums",
        "inspect": "print state, configuration and tensors",
        "diff": "name the tensors that differ, with their largest differences",
        "prune": "remove older checkpoints",
        "reshard": "write a checkpoint again, with another number of files",
        "export-weights": "write the weights as plain safetensors files with an index",
    }
    parsers = {name: _command(actions, name, help=text, description=f"{text[0].upper()}{text[1:]}.")
               for name, text in texts.items()}  # fmt: skip
    for name in ("ls", "prune"):
        parsers[name].add_argument("folder", metavar="FOLDER", help="--save folder of a run")
    for name in ("verify", "inspect"):
        parsers[name].add_argument("path", metavar="PATH", help=_RUN_FOLDER)
    for name in ("reshard", "export-weights"):
        parsers[name].add_argument("source", metavar="PATH", help=_RUN_FOLDER)
        parsers[name].add_argument("target", metavar="TARGET", help="folder to write to")
    for name in ("ls", "inspect"):
        parsers[name].add_argument("--json", action="store_true", help="print JSON")
    inspect, diff, prune = parsers["inspect"], parsers["diff"], parsers["prune"]
    inspect.add_argument(
        "--tensors",
        default="*",
        metavar="PATTERN",
        help="only tensors with such names; * is any text (default: all)",
    )
    inspect.add_argument(
        "--norms", action="store_true", help="read all data for norms, largest values and non-finite counts"
    )
    diff.add_argument("first", metavar="PATH", help="the first checkpoint")
    diff.add_argument("second", metavar="PATH", help="the second checkpoint")
    diff.add_argument("--all", action="store_true", help="compare optimizer state too (default: weights)")
    prune.add_argument(
        "--keep-last", type=int, required=True, metavar="N", help="keep the newest N; at least 2"
    )
    prune.add_argument("--retain-interval", type=int, metavar="N", help="also keep multiples of N iterations")
    prune.add_argument("--dry-run", action="store_true", help="print what would be removed")
    parsers["reshard"].add_argument("--files", type=int, required=True, metavar="N", help="number of files")
    _add_file_options(parsers["export-weights"])


def _add_file_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of safetensors files."""
    parser.add_argument(
        "--dtype",
        choices=("stored", "fp32", "bf16", "fp16"),
        default="stored",
        help="dtype (default: as stored)",
    )
    parser.add_argument(
        "--max-file-gb", type=float, default=5.0, metavar="GB", help="size limit of a file (default: 5)"
    )


def _add_convert(commands: Any) -> None:
    """Add `megatrain convert ...`."""
    convert = _command(
        commands,
        "convert",
        help="convert checkpoints of other programs, and to those of transformers",
        description="Convert checkpoints from and to those of other programs, without a GPU. No code that they name is run.",
    )
    directions = convert.add_subparsers(dest="action", required=True, metavar="DIRECTION")
    texts = {
        "megatron-to-megatrain": (
            "write a checkpoint of Megatron-LM as one of megatrain",
            "--save folder of Megatron-LM, or one of its iter_NNNNNNN folders",
        ),
        "megatrain-to-megatron": (
            "write a checkpoint as one of Megatron-LM (torch_dist), with which its runs continue",
            _RUN_FOLDER,
        ),
        "hf-to-megatrain": (
            "write a folder of transformers (config.json, safetensors) as a checkpoint of megatrain, to start from",
            "folder that save_pretrained wrote, or of a download",
        ),
        "megatrain-to-hf": (
            "write the weights of a checkpoint as a folder that from_pretrained of transformers reads",
            _RUN_FOLDER,
        ),
    }
    parsers = {}
    for name, (text, source) in texts.items():
        parsers[name] = _command(directions, name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        parsers[name].add_argument("source", metavar="PATH", help=source)
        parsers[name].add_argument("target", metavar="TARGET", help="folder to write to")
    megatron, _, theirs, ours = parsers.values()
    megatron.add_argument(
        "--allow-pickle",
        action="store_true",
        help="also read the format torch (mp_rank_*), whose files are pickled; no code in them is run",
    )
    rows = {
        megatron: "tokens to keep, without padding (default: --vocab-size of the run, or all rows if it had none)",
        theirs: "rows of the vocabulary to keep, such as the number of tokens of the tokenizer (default: all)",
    }
    for parser, text in rows.items():
        parser.add_argument("--vocab-size", type=int, metavar="N", help=text)
        parser.add_argument("--files", type=int, metavar="N", help="number of files (default: of 5 GB each)")
    ours.add_argument(
        "--architecture",
        metavar="NAME",
        help="class of transformers, such as MistralForCausalLM (default: the first that computes the same)",
    )
    ours.add_argument(
        "--no-compare", action="store_true", help="do not load both models to compare their logits"
    )
    _add_file_options(ours)


def _add_parity(commands: Any) -> None:
    parity = _command(
        commands,
        "parity",
        help="check that every parallel layout computes the same as one process",
        description="Train tiny models under each layout and compare losses, gradients and weights with one process."
        " Without flags: rows that cover every pair of options' values, in fp64, and some rows in fp32, bf16 and fp16.",
    )
    parity.add_argument(
        "--layouts",
        nargs="+",
        default=[],
        metavar="WORD",
        help="only rows with all of these words, such as `tp2 sp`; if there are none, that layout itself (default: all)",
    )
    which = parity.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="the 32 rows that cover most pairs, in fp64")
    which.add_argument("--full", action="store_true", help="every combination of many options; takes hours")
    which.add_argument(
        "--self-test", action="store_true", help="plant known faults instead and check that each is found"
    )
    parity.add_argument("--slice", metavar="I/N", help="only every Nth row, starting with row I")
    parity.add_argument(
        "--results",
        metavar="FILE",
        help="record results in FILE, and skip rows that have passed there with the same code",
    )
    parity.add_argument(
        "--precision", choices=("fp64", "fp32", "bf16", "fp16"), help="run all rows in this precision"
    )
    parity.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="device; on cuda each rank has a GPU of its own (default: cpu)",
    )
    parity.add_argument(
        "--transformer-impl",
        choices=("local", "transformer_engine"),
        default="local",
        help="implementation of the layers in rows that support it; compared with `local` in bf16 (default: local)",
    )


def _add_port(commands: Any) -> None:
    port = _command(
        commands,
        "port",
        help="print the command for a launch script or a YAML file of Megatron-LM",
        description="Read a launch script that runs pretrain_gpt.py, or a YAML file of its arguments, and print the command for"
        " megatrain, with what changed and why as comments. The script is not executed. Exit code: 0 if the run would"
        " start, 1 if not.",
    )
    port.add_argument("file", metavar="SCRIPT.sh | FILE.yaml", help="launch script or YAML file")
    port.add_argument(
        "values", nargs="*", metavar="NAME=VALUE", help="values of variables that the script leaves open"
    )
    port.add_argument(
        "--world-size", type=int, metavar="N", help="ranks of the run (default: those of the launcher)"
    )


def _add_report(commands: Any) -> None:
    report = _command(
        commands,
        "report",
        help="write the curves of runs as one HTML page",
        description="Write one HTML page with the curves, evaluations and settings of runs. It needs no network.",
    )
    report.add_argument("runs", nargs="+", metavar="RUN", help="--save folder or --metrics-file of a run")
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
    """Add `megatrain data ...`. `texts`: help texts of the settings; only needed to print help."""
    data = _command(
        commands,
        "data",
        help="inspect datasets, show samples, build index caches, merge datasets",
        description="A dataset is named by its prefix: the path without .bin and .idx.",
    )
    actions = data.add_subparsers(dest="action", required=True, metavar="ACTION")

    inspect = _command(
        actions,
        "inspect",
        help="count documents and tokens of a dataset, and check its description",
        description="Count documents and tokens of a dataset, and compare them with its description PREFIX.json.",
    )
    inspect.add_argument("prefix", metavar="PREFIX", help="path without .bin and .idx")
    inspect.add_argument("--document", type=int, metavar="K", help="show document K, counted from 0")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    _add_tokenizer(inspect, texts)

    sample = _command(
        actions,
        "sample",
        takes_run_flags=True,
        help="show one sample exactly as training reads it",
        usage="%(prog)s FLAGS --of {train,valid,test} --index K [--set NAME] [--world-size N] [--json]",
        description=f"Show one sample of a run. {_RUN_FLAGS}",
    )
    sample.add_argument("--of", required=True, choices=("train", "valid", "test"), help="the split")
    sample.add_argument(
        "--index", required=True, type=int, metavar="K", help="number of the sample, counted from 0"
    )
    sample.add_argument("--set", metavar="NAME", help="name of one of --multiple-validation-sets")
    sample.add_argument("--json", action="store_true", help="print one JSON object")

    index = _command(
        actions,
        "index",
        takes_run_flags=True,
        help="build the index caches of a run in advance",
        usage="%(prog)s FLAGS [--world-size N]",
        description=f"Build the sample indices of a run in its cache folder. {_RUN_FLAGS}",
    )
    for parser in (sample, index):
        parser.add_argument(
            "--world-size",
            type=int,
            metavar="N",
            help="ranks of the run (default: the smallest number for its layout); it changes the order of samples only"
            " without --global-batch-size",
        )

    merge = _command(
        actions,
        "merge",
        help="merge datasets into one",
        description="Write one dataset with the documents of several, in the order of the arguments.",
    )
    merge.add_argument("prefixes", nargs="+", metavar="PREFIX", help="paths without .bin and .idx")
    merge.add_argument("--output-prefix", required=True, metavar="OUT", help="path of the new dataset")


_RUN_FLAGS = (
    "FLAGS are the flags of pretrain.py, including --config; see `python pretrain.py --help`. It needs neither GPUs nor"
    " other ranks."
)


def _add_tokenizer(parser: argparse.ArgumentParser, texts: Mapping[str, str]) -> None:
    """Add the tokenizer's flags; values are stored as text, by the path of the setting."""
    group = parser.add_argument_group("tokenizer", "to decode documents and to know their end token")
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
