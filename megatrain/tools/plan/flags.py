"""Flags of `megatrain plan`. This module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatrain.tools.subcommands import add_command


def add_flags(commands: Any) -> None:
    """Add `megatrain plan`."""
    plan = add_command(
        commands,
        "plan",
        help="find the best pipeline schedule and split for given times",
        description="Simulate every pipeline schedule and split of the layers; print a table, the fastest first.",
    )
    actions = plan.add_subparsers(dest="action", required=True, metavar="WHAT")
    _add_pipeline(actions)


def with_action(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with the action `layouts` if it is `megatrain plan` without an action.

    argparse has no default for subcommands, and would read the value of a run's flag as the action.
    """
    if list(words[:1]) == ["plan"] and len(words) > 1 and words[1].startswith("--") and words[1] != "--help":
        return ["plan", "layouts", *words[1:]]
    return list(words)


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
