"""`megatrain checkpoint`: the subcommands by name."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Final

from megatrain.tools.checkpoint.contents import diff, inspect
from megatrain.tools.checkpoint.folders import ls, prune, verify_all
from megatrain.tools.checkpoint.rewrite import export_weights, reshard
from megatrain.tools.subcommands import run_action

_ACTIONS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = {
    "ls": ls,
    "verify": verify_all,
    "inspect": inspect,
    "diff": diff,
    "prune": prune,
    "reshard": reshard,
    "export-weights": export_weights,
}


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code."""
    return run_action(_ACTIONS, arguments)
