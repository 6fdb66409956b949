"""`megatrain plan`: run the action of a command line."""

from __future__ import annotations

import argparse

from megatrain.tools.plan import pipeline
from megatrain.tools.subcommands import run_action


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code."""
    return run_action({"pipeline": pipeline.run}, arguments)
