"""`megatrain checkpoint`: the subcommands and their flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatrain.tools.checkpoint.average import average
from megatrain.tools.checkpoint.contents import diff, inspect
from megatrain.tools.checkpoint.folders import ls, prune, verify
from megatrain.tools.checkpoint.rewrite import export_weights, merge_lora, reshard
from megatrain.tools.subcommands import RUN_FOLDER, add_command, add_file_options


def add_flags(commands: Any) -> None:
    """Add `megatrain checkpoint ...`."""
    checkpoint = add_command(
        commands,
        "checkpoint",
        description="Work with checkpoints, without a GPU. PATH is the --save folder of a run, which stands for its newest"
        " valid checkpoint, or one of its iter_NNNNNNN folders.",
    )
    actions = checkpoint.add_subparsers(dest="action", required=True, metavar="ACTION")
    parser = add_command(actions, "ls", ls)
    parser.add("folder FOLDER", "--save folder of a run", of=Path)
    parser.add("--json", "print JSON")
    parser = add_command(actions, "verify", verify)
    parser.add("path PATH", RUN_FOLDER, of=Path)
    parser = add_command(actions, "inspect", inspect)
    parser.add("path PATH", RUN_FOLDER, of=Path)
    parser.add("--json", "print JSON")
    parser.add("--tensors PATTERN", "only tensors with such names; * is any text (default: all)", "*")
    parser.add("--norms", "read all data for norms, largest values and non-finite counts")
    parser = add_command(actions, "diff", diff)
    parser.add("first PATH", "the first checkpoint", of=Path)
    parser.add("second PATH", "the second checkpoint", of=Path)
    parser.add("--all", "compare optimizer state too (default: weights)")
    parser = add_command(actions, "prune", prune)
    parser.add("folder FOLDER", "--save folder of a run", of=Path)
    parser.add("--keep-last N", "keep the newest N; at least 2", of=int, required=True)
    parser.add("--retain-interval N", "also keep multiples of N iterations", of=int, at_least=1)
    parser.add("--dry-run", "print what would be removed")
    parser = add_command(actions, "reshard", reshard)
    parser.add("source PATH", RUN_FOLDER, of=Path)
    parser.add("target TARGET", "folder to write to", of=Path)
    parser.add("--files N", "number of files", of=int, required=True, at_least=1)
    parser = add_command(actions, "average", average)
    parser.add("sources PATH ...", RUN_FOLDER, of=Path)
    parser.add("target TARGET", "folder to write to", of=Path)
    newest = "the newest N checkpoints of the one PATH (default: the newest)"
    parser.add("--last N", newest, of=int, at_least=1)
    parser.add("--ema", "take the averages of --ema-decay in place of the weights")
    parser = add_command(actions, "merge-lora", merge_lora)
    parser.add("source PATH", RUN_FOLDER, of=Path)
    parser.add("target TARGET", "folder to write to", of=Path)
    parser = add_command(actions, "export-weights", export_weights)
    parser.add("source PATH", RUN_FOLDER, of=Path)
    parser.add("target TARGET", "folder to write to", of=Path)
    add_file_options(parser)
