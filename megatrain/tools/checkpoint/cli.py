"""`megatrain checkpoint`: the subcommands and their flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatrain.tools.checkpoint.average import average
from megatrain.tools.checkpoint.contents import diff, inspect
from megatrain.tools.checkpoint.folders import ls, prune, verify
from megatrain.tools.checkpoint.rewrite import export_weights, merge_lora, reshard
from megatrain.tools.subcommands import RUN_FOLDER, add_command, add_commands, add_file_options


def add_flags(commands: Any) -> None:
    """Add `megatrain checkpoint ...`."""
    checkpoint = add_command(
        commands,
        "checkpoint",
        description="Work with checkpoints, without a GPU. PATH is the --save folder of a run, which stands for its newest"
        " valid checkpoint, or one of its iter_NNNNNNN folders.",
    )
    actions = checkpoint.add_subparsers(dest="action", required=True, metavar="ACTION")
    texts: dict[Callable[[argparse.Namespace], int], str] = {
        ls: "list the checkpoints of a folder: committed, partial or damaged",
        verify: "read all data and compare it with the checksums",
        inspect: "print state, configuration and tensors",
        diff: "name the tensors that differ, with their largest differences",
        prune: "remove older checkpoints",
        reshard: "write a checkpoint again, with another number of files",
        average: "write the mean of the weights of several checkpoints as a checkpoint of weights alone",
        merge_lora: "write the weights with the adapters of --lora-rank merged into them, as a checkpoint",
        export_weights: "write the weights as plain safetensors files with an index",
    }
    parsers = add_commands(actions, texts)
    for name in ("ls", "prune"):
        parsers[name].add_argument("folder", metavar="FOLDER", help="--save folder of a run")
    for name in ("verify", "inspect"):
        parsers[name].add_argument("path", metavar="PATH", help=RUN_FOLDER)
    for name in ("reshard", "merge-lora", "export-weights"):
        parsers[name].add_argument("source", metavar="PATH", help=RUN_FOLDER)
        parsers[name].add_argument("target", metavar="TARGET", help="folder to write to")
    parsers["average"].add_argument("sources", metavar="PATH", nargs="+", help=RUN_FOLDER)
    parsers["average"].add_argument("target", metavar="TARGET", help="folder to write to")
    parsers["average"].add_argument(
        "--last", type=int, metavar="N", help="the newest N checkpoints of the one PATH (default: the newest)"
    )
    parsers["average"].add_argument(
        "--ema", action="store_true", help="take the averages of --ema-decay in place of the weights"
    )
    for name in ("ls", "inspect"):
        parsers[name].add_argument("--json", action="store_true", help="print JSON")
    parsers["inspect"].add_argument(
        "--tensors",
        default="*",
        metavar="PATTERN",
        help="only tensors with such names; * is any text (default: all)",
    )
    parsers["inspect"].add_argument(
        "--norms", action="store_true", help="read all data for norms, largest values and non-finite counts"
    )
    parsers["diff"].add_argument("first", metavar="PATH", help="the first checkpoint")
    parsers["diff"].add_argument("second", metavar="PATH", help="the second checkpoint")
    parsers["diff"].add_argument(
        "--all", action="store_true", help="compare optimizer state too (default: weights)"
    )
    parsers["prune"].add_argument(
        "--keep-last", type=int, required=True, metavar="N", help="keep the newest N; at least 2"
    )
    parsers["prune"].add_argument(
        "--retain-interval", type=int, metavar="N", help="also keep multiples of N iterations"
    )
    parsers["prune"].add_argument("--dry-run", action="store_true", help="print what would be removed")
    parsers["reshard"].add_argument("--files", type=int, required=True, metavar="N", help="number of files")
    add_file_options(parsers["export-weights"])
