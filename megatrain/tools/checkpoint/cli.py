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
        parsers[name].add("folder FOLDER", "--save folder of a run")
    for name in ("verify", "inspect"):
        parsers[name].add("path PATH", RUN_FOLDER)
    for name in ("reshard", "merge-lora", "export-weights"):
        parsers[name].add("source PATH", RUN_FOLDER)
        parsers[name].add("target TARGET", "folder to write to")
    parsers["average"].add("sources PATH ...", RUN_FOLDER)
    parsers["average"].add("target TARGET", "folder to write to")
    parsers["average"].add(
        "--last N", "the newest N checkpoints of the one PATH (default: the newest)", of=int, at_least=1
    )
    parsers["average"].add("--ema", "take the averages of --ema-decay in place of the weights")
    for name in ("ls", "inspect"):
        parsers[name].add("--json", "print JSON")
    parsers["inspect"].add(
        "--tensors PATTERN", "only tensors with such names; * is any text (default: all)", "*"
    )
    parsers["inspect"].add("--norms", "read all data for norms, largest values and non-finite counts")
    parsers["diff"].add("first PATH", "the first checkpoint")
    parsers["diff"].add("second PATH", "the second checkpoint")
    parsers["diff"].add("--all", "compare optimizer state too (default: weights)")
    parsers["prune"].add("--keep-last N", "keep the newest N; at least 2", of=int, required=True)
    parsers["prune"].add("--retain-interval N", "also keep multiples of N iterations", of=int, at_least=1)
    parsers["prune"].add("--dry-run", "print what would be removed")
    parsers["reshard"].add("--files N", "number of files", of=int, required=True, at_least=1)
    add_file_options(parsers["export-weights"])
