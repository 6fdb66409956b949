"""`megatrain checkpoint`: the subcommands and their flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatrain.tools.checkpoint.average import average
from megatrain.tools.checkpoint.contents import diff, inspect
from megatrain.tools.checkpoint.folders import ls, prune, verify
from megatrain.tools.checkpoint.rewrite import export_weights, merge_lora, reshard
from megatrain.tools.subcommands import RUN_FOLDER, add_action, add_command, add_file_options


def add_flags(commands: Any) -> None:
    """Add `megatrain checkpoint ...`."""
    checkpoint = add_command(
        commands,
        "checkpoint",
        description="Work with checkpoints, without a GPU. PATH is the --save folder of a run, which stands for its newest"
        " valid checkpoint, or one of its iter_NNNNNNN folders.",
    )
    actions = checkpoint.add_subparsers(dest="action", required=True, metavar="ACTION")
    parser = add_action(actions, ls, "list the checkpoints of a folder: committed, partial or damaged")
    parser.add("folder FOLDER", "--save folder of a run", of=Path)
    parser.add("--json", "print JSON")
    parser = add_action(actions, verify, "read all data and compare it with the checksums")
    parser.add("path PATH", RUN_FOLDER, of=Path)
    parser = add_action(actions, inspect, "print state, configuration and tensors")
    parser.add("path PATH", RUN_FOLDER, of=Path)
    parser.add("--json", "print JSON")
    parser.add("--tensors PATTERN", "only tensors with such names; * is any text (default: all)", "*")
    parser.add("--norms", "read all data for norms, largest values and non-finite counts")
    parser = add_action(actions, diff, "name the tensors that differ, with their largest differences")
    parser.add("first PATH", "the first checkpoint", of=Path)
    parser.add("second PATH", "the second checkpoint", of=Path)
    parser.add("--all", "compare optimizer state too (default: weights)")
    parser = add_action(actions, prune, "remove older checkpoints")
    parser.add("folder FOLDER", "--save folder of a run", of=Path)
    parser.add("--keep-last N", "keep the newest N; at least 2", of=int, required=True)
    parser.add("--retain-interval N", "also keep multiples of N iterations", of=int, at_least=1)
    parser.add("--dry-run", "print what would be removed")
    parser = add_action(actions, reshard, "write a checkpoint again, with another number of files")
    parser.add("source PATH", RUN_FOLDER, of=Path)
    parser.add("target TARGET", "folder to write to", of=Path)
    parser.add("--files N", "number of files", of=int, required=True, at_least=1)
    text = "write the mean of the weights of several checkpoints as a checkpoint of weights alone"
    parser = add_action(actions, average, text)
    parser.add("sources PATH ...", RUN_FOLDER, of=Path)
    parser.add("target TARGET", "folder to write to", of=Path)
    newest = "the newest N checkpoints of the one PATH (default: the newest)"
    parser.add("--last N", newest, of=int, at_least=1)
    parser.add("--ema", "take the averages of --ema-decay in place of the weights")
    text = "write the weights with the adapters of --lora-rank merged into them, as a checkpoint"
    parser = add_action(actions, merge_lora, text)
    parser.add("source PATH", RUN_FOLDER, of=Path)
    parser.add("target TARGET", "folder to write to", of=Path)
    parser = add_action(actions, export_weights, "write the weights as plain safetensors files with an index")
    parser.add("source PATH", RUN_FOLDER, of=Path)
    parser.add("target TARGET", "folder to write to", of=Path)
    add_file_options(parser)
