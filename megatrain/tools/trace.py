"""`megatrain trace`: print the table of a trace that --profile wrote, of any rank."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatrain.tools.subcommands import add_command
from megatrain.training.debugging.trace_summary import read_trace


def add_flags(commands: Any) -> None:
    """Add `megatrain trace`."""
    trace = add_command(commands, "trace", run)
    trace.add("file FILE", "trace that --profile wrote, such as rank1.json.gz", of=Path)


def run(arguments: argparse.Namespace) -> None:
    """Print compute, exposed communication and idle time of a trace of --profile, as the run does for rank 0."""
    print(read_trace(arguments.file).text())
