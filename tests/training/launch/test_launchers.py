"""Processes without torchrun: ranks from the variables of Slurm, and variables that contradict each other."""

import os
import re
import socket
import subprocess
import sys

import pytest
from free_ports import free_port
from run_helpers import ROOT, command_line

import pretrain
from megatrain.config.environment import DEFAULT_PORT


@pytest.mark.nightly
def test_two_tasks_of_srun_train_together() -> None:
    job = {
        "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    words = [sys.executable, "pretrain.py", *command_line({"--tensor-model-parallel-size": "2"})]
    tasks = [
        subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | job | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)},
        )
        for task in range(2)
    ]  # fmt: skip
    (shown, errors), (shown_elsewhere, _) = (task.communicate(timeout=120) for task in tasks)
    assert [task.returncode for task in tasks] == [0, 0], errors
    assert "> started by srun: SLURM_PROCID 0, SLURM_NTASKS 2; rendezvous at localhost:" in shown
    assert "grid: 2 ranks = tp 2 x dp 1 x pp 1" in shown
    assert shown_elsewhere == ""


def test_launchers_that_contradict_each_other_are_reported_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "RANK": "0", "WORLD_SIZE": "4"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert pretrain.main(command_line({})) == 2
    assert "error: WORLD_SIZE is 4, and SLURM_NTASKS is 2\n  fix: unset WORLD_SIZE" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_PROCID", "1")  # variables of a rank other than 0 may be wrong alone
    monkeypatch.setenv("RANK", "1")
    assert pretrain.main(command_line({})) == 2
    assert "rank 1: error: WORLD_SIZE is 4, and SLURM_NTASKS is 2" in capsys.readouterr().err


def test_a_port_in_use_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        assert pretrain.main(command_line({})) == 1
    assert port != DEFAULT_PORT
    error = capsys.readouterr().err
    assert "rank 0 of 2 cannot reach the rendezvous (RANK 0, WORLD_SIZE 2" in error
    assert f"127.0.0.1:{port}" in error
    assert "fix: set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port" in error


def test_the_page_shows_messages_of_the_program() -> None:
    """Each message in docs/launching.md is in a test that makes the program print it, or in the program."""
    page = re.sub("(?ms)^```.*?^```$", "", (ROOT / "docs" / "launching.md").read_text())
    messages = [line.strip() for line in page.splitlines() if line.startswith("    ")]
    texts = "".join(
        path.read_text()
        for folder in ("tests/training", "tests/distributed", "megatrain/training")
        for path in (ROOT / folder).rglob("*.py")
    )
    assert len(messages) > 10
    for line in messages:
        words = line.removeprefix("error: iteration 2: lm loss is nan, gradient norm nan; ")
        words = words.removeprefix("fix: nothing was updated or saved; ")
        assert words in texts, f"neither a test nor the program has: {words}"
