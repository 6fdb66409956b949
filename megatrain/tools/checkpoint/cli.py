"""`megatrain checkpoint`: the subcommands by name."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from typing import Final

from megatrain.tools.checkpoint.contents import diff, inspect
from megatrain.tools.checkpoint.folders import ls, prune, verify_all
from megatrain.tools.checkpoint.rewrite import export_weights, reshard

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
    try:
        exit_code = _ACTIONS[arguments.action](arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return exit_code
