"""`megatrain settings`: print the tables of all settings, or of the differences from Megatron-LM, as Markdown."""

from __future__ import annotations

import argparse
from typing import Any

from megatrain.config import docs_reference
from megatrain.config.megatron.differences import docs_differences
from megatrain.tools.subcommands import add_command


def add_flags(commands: Any) -> None:
    """Add `megatrain settings`."""
    command = add_command(commands, "settings", run)
    command.add(
        "--differences",
        "print instead the defaults that differ from Megatron-LM's, and its flags that are not settings here",
    )


def run(arguments: argparse.Namespace) -> None:
    """Print every flag and YAML key with its values, default and meaning, as Markdown tables."""
    print(docs_differences() if arguments.differences else docs_reference(), end="")
