"""Flags of `megatrain plan`. This module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from megatrain.tools.subcommands import RUN_FLAGS, add_command

GPU_NAMES: Final = ("A100", "H100", "H200", "B200")


def add_flags(commands: Any) -> None:
    """Add `megatrain plan`."""
    plan = add_command(
        commands,
        "plan",
        help="find the best layout of a run, or the best pipeline schedule for given times",
        description="Without WHAT: layouts.",
    )
    actions = plan.add_subparsers(dest="action", required=True, metavar="WHAT")
    _add_layouts(actions)
    _add_pipeline(actions)


def with_action(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with the action `layouts` if it is `megatrain plan` without an action.

    argparse has no default for subcommands, and would read the value of a run's flag as the action.
    """
    if list(words[:1]) == ["plan"] and len(words) > 1 and words[1].startswith("--") and words[1] != "--help":
        return ["plan", "layouts", *words[1:]]
    return list(words)


def _add_layouts(actions: Any) -> None:
    """Add `megatrain plan layouts`."""
    layouts = add_command(
        actions,
        "layouts",
        takes_run_flags=True,
        help="find the layouts of a run that fit, with predicted time and memory",
        usage="%(prog)s FLAGS --world-size N [--gpu NAME] [--memory-gb GB] [--gpus-per-node N] [--network-gbits G]"
        " [--top N] [--json]",
        description="Predict step time, MFU and memory of the layouts of a run that fit, and print the fastest with their"
        f" flags. Layout flags on the command line are kept, those of a --config file are not. {RUN_FLAGS}",
    )
    layouts.add_argument("--world-size", type=int, required=True, metavar="N", help="GPUs of the run")
    layouts.add_argument("--gpu", choices=GPU_NAMES, default="H100", help="GPU, SXM (default: %(default)s)")
    layouts.add_argument(
        "--memory-gb",
        type=float,
        metavar="GB",
        help="memory of a GPU for tensors, in 10^9 bytes (default: the GPU's, less 4 for CUDA, NCCL and fragmentation)",
    )
    layouts.add_argument(
        "--gpus-per-node", type=int, default=8, metavar="N", help="GPUs that NVLink connects (default: 8)"
    )
    layouts.add_argument(
        "--network-gbits",
        type=float,
        metavar="G",
        help="Gbit/s of the network between nodes for each GPU (default: 400, with the A100 200)",
    )
    layouts.add_argument("--top", type=int, default=5, metavar="N", help="layouts to print (default: 5)")
    layouts.add_argument("--json", action="store_true", help="print one JSON object")


def _add_pipeline(actions: Any) -> None:
    """Add `megatrain plan pipeline`."""
    plan = add_command(
        actions,
        "pipeline",
        help="find the best pipeline schedule and split for given times",
        description="Simulate every pipeline schedule and split of the layers; print a table, the fastest first.",
    )
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
            "time of a forward and a backward pass that run together, as a fraction of both",
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
