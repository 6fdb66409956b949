"""Subcommands with actions, such as `megatrain data inspect`."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping


def run_action(
    actions: Mapping[str, Callable[[argparse.Namespace], int]], arguments: argparse.Namespace
) -> int:
    """Run the action of `arguments`; return the exit code, which is 0 if the reader of the output ends first."""
    try:
        exit_code = actions[arguments.action](arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return exit_code
