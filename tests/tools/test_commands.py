"""`megatrain --help` answers at once, and each subcommand that it lists can be run."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megatrain.config.errors import ConfigError
from megatrain.tools.main import COMMANDS, main, parser
from megatrain.tools.subcommands import CommandParser, launcher_of


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


def test_a_flag_is_declared_as_help_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    own = CommandParser(prog="x")
    own.add("runs RUN ...", "runs to read")
    own.add("--once", "look once")
    own.add("--interval SECONDS", "time between two looks", 30.0, above=0)
    own.add("--kind", "what to look at", "all", choices=("all", "some"))
    own.add("--sizes N ...", "sizes (default: the usual ones)", (), of=int, at_least=1)
    found = own.parse_args(["a", "b", "--interval", "1e-1", "--sizes", "1", "2"])
    assert vars(found) == {"runs": ["a", "b"], "once": False, "interval": 0.1, "kind": "all", "sizes": [1, 2]}
    assert vars(own.parse_args(["a"])) == {
        "runs": ["a"],
        "once": False,
        "interval": 30.0,
        "kind": "all",
        "sizes": (),
    }
    own.print_help()
    shown = capsys.readouterr().out
    for text in (
        "time between two looks (default: 30)",
        "what to look at (default: all)",
        "sizes (default: the usual ones)\n",
    ):
        assert text in shown


@pytest.mark.parametrize(
    ("words", "problem", "fix"),
    [
        ("alerts run --port 70000", "--port 70000 must be at least 0 and at most 65535", "give --port a whole number"),
        ("plan --world-size 8 --network-gbits 0", "--network-gbits 0 must be above 0", "give --network-gbits a number"),
        ("parity --random 0", "--random 0 must be at least 1", "give --random a whole number at least 1"),
        ("watch run --interval fast", "--interval fast is not a number", "give --interval a number"),
    ],
)  # fmt: skip
def test_a_number_out_of_range_is_refused(
    words: str, problem: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {problem}\n  fix: {fix}")


def test_an_unknown_flag_is_an_error_of_ours() -> None:
    with pytest.raises(ConfigError, match="unrecognized arguments: --onec\n  fix: did you mean --once"):
        parser("watch").parse_args(["watch", "run"]).parser.error("unrecognized arguments: --onec")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, "python"),
        (8, "torchrun --standalone --nproc-per-node 8"),
        (12, "torchrun --nnodes 2 --nproc-per-node 6 --rdzv-backend c10d --rdzv-endpoint HOST:29500"),
        (16, "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500"),
    ],
)
def test_a_launcher_starts_so_many_ranks(ranks: int, words: str) -> None:
    assert launcher_of(ranks) == words
