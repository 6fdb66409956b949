"""`megatrain trace`: print the table of a trace that --profile wrote, of any rank."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatrain.training.debugging.trace_summary import read_trace


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code."""
    print(read_trace(Path(arguments.file)).text())
    return 0
