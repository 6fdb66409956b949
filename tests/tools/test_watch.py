"""`megatrain watch` shows the state of a run from its files: progress, curves, evaluations, faults, signs of life."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tools.test_report import make_run

from megatrain.tools.main import main
from megatrain.tools.report_data import read_run
from megatrain.tools.subcommands import duration
from megatrain.tools.watch import _PLAIN, fitted, lines, shown, sparkline
from megatrain.training.launch.save_lock import Owner


def test_a_finished_run_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(make_run(tmp_path))]) == 0
    text = capsys.readouterr().out
    assert text.startswith("run: signal SIGTERM (exit code 75), iteration 4\n")
    for words in (
        "loss        2 ",
        "█▃▂▁  from 8",
        "250 tokens/s per rank",
        "1.8 s an iteration",
        "valid 2.5 at iteration 4",
    ):
        assert words in text


def test_a_running_run_has_its_time_left(tmp_path: Path) -> None:
    run = running(tmp_path)
    assert first_line(run, after=1) == "run: running, iteration 4 of 1,004 (0.4%), 30 min left"


def test_a_silent_run_is_named(tmp_path: Path) -> None:
    line = first_line(running(tmp_path), after=7261)
    assert line.startswith("run: no sign of life since ")
    assert line.endswith("(2 h 1 min), iteration 4 of 1,004 (0.4%)")


def test_a_killed_run_is_dead_at_once(tmp_path: Path) -> None:
    """Its lock names a process that is gone; status.json still says that the run is active."""
    run = running(tmp_path)
    dead = subprocess.run([sys.executable, "-c", OWNER], capture_output=True, text=True, check=True).stdout
    (run / "run.lock").write_text(dead)
    pid = json.loads(dead)["pid"]
    words = rf"run: dead since about 2\d{{3}}-.*: process {pid} on .* was killed before it could record why"
    assert re.match(words, first_line(run, after=1))
    (run / "run.lock").write_bytes(Owner.of_this_process().to_bytes())
    assert first_line(run, after=1).startswith("run: running")


OWNER = """
from megatrain.training.launch.save_lock import Owner
print(Owner.of_this_process().to_bytes().decode())
"""


def test_iterations_that_update_nothing_are_listed(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    rows = [{"iteration": n, "lm_loss": None, "nan": n % 2, "skipped": 1} for n in range(5, 12)]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n" + "".join(json.dumps(row) + "\n" for row in rows))
    text = "\n".join(lines(read_run(folder, "run"), width=80, now=0.0))
    assert "faults      7: .. 7 NaN, 8 skipped, 9 NaN, 10 skipped, 11 NaN" in text


def test_lines_wrap_and_have_colour_only_on_a_terminal(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    refused = {"exit_code": 2, "reason": "--lr differs " + "from the checkpoint " * 6}
    status = {"exit_code": 0, "reason": "the target is reached", "refused_start": refused}
    (folder / "status.json").write_text(json.dumps(status))
    with (folder / "metrics.jsonl").open("a") as file:
        row = {"iteration": 4, "validation": "code", "accuracy": 0.25, "bits_per_byte": 1.5}
        file.write("\n" + json.dumps(row) + "\n")
    run = read_run(folder, "run")
    plain, coloured = (
        shown(run, width=60, now=0.0, is_coloured=is_coloured) for is_coloured in (False, True)
    )
    assert all(len(line) <= 60 for line in plain.splitlines())
    assert "accuracy    code 25.0% at iteration 4" in plain
    assert "bits/byte   code 1.5 at iteration 4" in plain
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[\d+m", "", coloured) == plain


def test_a_sparkline_has_the_means_of_equal_parts() -> None:
    assert sparkline([0, 0, 7, 7, 3.5, 3.5], 3) == "▁█▅"
    assert sparkline([2.0], 10) == "▁"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59, "59 s"), (60, "1 min"), (3725, "1 h 2 min"), (90000, "1 d 1 h")]
)
def test_a_duration_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def running(folder: Path) -> Path:
    """Write the folder of a run that has not ended."""
    run = make_run(folder)
    with (run / "config.yaml").open("a") as file:
        file.write("training:\n  train_iters: 1004\n")
    status: dict[str, Any] = {"exit_code": None, "reason": "running"}
    (run / "status.json").write_text(json.dumps(status))
    return run


def first_line(folder: Path, *, after: float) -> str:
    """Return the first line about a run, `after` seconds from its last write."""
    for file in folder.iterdir():
        os.utime(file, (1.7e9, 1.7e9))
    return next(iter(lines(read_run(folder, "run"), width=80, now=1.7e9 + after)))


def test_several_runs_fit_the_rows_of_a_terminal() -> None:
    runs = ["\n".join(f"run {number} line {line}" for line in range(10)) for number in range(3)]
    assert fitted(runs, 40) == "\n\n".join(runs)
    small = fitted(runs, 24).split("\n")
    assert len(small) + 3 <= 24
    assert [line.removesuffix(_PLAIN) for line in small if "line 0" in line] == [
        f"run {n} line 0" for n in range(3)
    ]
    assert len(fitted(runs * 20, 24).split("\n")) == 119, "a line each"
