"""`megatrain --help` answers at once, and each subcommand that it lists can be run."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megatrain.tools.main import COMMANDS, parser


def subcommands(found: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers without subcommands of their own."""
    actions = [action for action in found._actions if isinstance(action, argparse._SubParsersAction)]
    if not actions:
        yield found
    for action in actions:
        for inner in action.choices.values():
            yield from subcommands(inner)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_subcommand_has_a_function(command: str) -> None:
    found = list(subcommands(parser(command)))
    assert all(
        one.prog.startswith(f"megatrain {command}") and callable(one.get_default("run")) for one in found
    )


def test_help_lists_all_subcommands_without_torch() -> None:
    code = "import sys; from megatrain.tools.main import parser; parser().print_help(); sys.exit('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert set(re.findall(r"^    ([a-z-]+)", shown, re.MULTILINE)) == set(COMMANDS)
