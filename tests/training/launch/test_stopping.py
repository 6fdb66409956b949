"""Requests to stop: a file, and a second signal to a run whose main thread is blocked."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from run_helpers import ROOT, command_line, wait_for

import pretrain
from megatrain.training import stopping
from megatrain.training.engine import Engine
from megatrain.training.stopping import StopRequest

BLOCKED = """
import ctypes, sys, time
from megatrain.training import stopping
stopping._SECONDS_OF_REPEATED_SIGNALS = 0.2
def write(text):
    open(sys.argv[1], "a").write(text + "\\n")
stop = stopping.StopRequest(
    exit_interval=None, exit_duration_in_mins=None, exit_signal=15, report=write, before_kill=lambda code, reason: write(reason)
)
mutex = ctypes.create_string_buffer(64)
with stop.listening():
    write("listening")
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)  # a deadlock, in which Python handles no signal
"""


def test_a_second_signal_ends_a_process_that_is_blocked(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    words, environment = [sys.executable, "-c", BLOCKED, str(lines)], os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lines, lines=1)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)  # within moments: it counts as the same request
        wait_for(lines, lines=2)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGINT
    assert errors == "a second signal, SIGINT: the process ends at once\n"
    _, reported, reason = lines.read_text().splitlines()
    assert "the run stops after this iteration" in reported  # the kernel may deliver either first
    assert reason == "a second signal, SIGINT"


def test_a_stop_file_ends_the_run_and_prevents_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save, file = tmp_path / "run", tmp_path / "stop"
    begin, calls = Engine.begin_step, []

    def begin_step(engine: Engine, *arguments: Any, **more: Any) -> Any:
        calls.append(engine)
        if len(calls) == 3:
            file.touch()
        return begin(engine, *arguments, **more)

    monkeypatch.setattr(Engine, "begin_step", begin_step)
    monkeypatch.setattr(stopping, "_SECONDS_BETWEEN_LOOKS", 0.0)
    flags = {"--save": str(save), "--load": str(save), "--train-iters": "6", "--exit-file": str(file)}
    assert pretrain.main(command_line(flags)) == 75
    status = json.loads((save / "status.json").read_text())
    assert (status["exit_code"], status["iteration"]) == (75, 3)
    assert status["reason"] == "the file of --exit-file is there"
    assert (save / "iter_0000003").is_dir()
    assert pretrain.main(command_line(flags)) == 2
    assert f"--exit-file {file} exists" in capsys.readouterr().err
    file.unlink()
    assert pretrain.main(command_line(flags)) == 0


def test_a_file_is_looked_for_once_a_second(tmp_path: Path) -> None:
    stop = StopRequest(
        exit_interval=None, exit_duration_in_mins=None, exit_signal=15, exit_file=tmp_path / "x"
    )
    assert stop.flags() == (0, 0, 0, 0)
    (tmp_path / "x").touch()
    assert stop.flags() == (0, 0, 0, 0)


def test_a_file_system_that_fails_for_a_moment_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "_SECONDS_BETWEEN_LOOKS", 0.0)
    too_long = tmp_path / ("x" * 300)  # the system call fails
    stop = StopRequest(exit_interval=None, exit_duration_in_mins=None, exit_signal=15, exit_file=too_long)
    assert stop.flags() == (0, 0, 0, 0)
    stop.exit_file = tmp_path
    assert any(stop.flags())


def test_signals_of_another_handler_are_no_requests() -> None:
    seen = []
    former = signal.signal(signal.SIGUSR2, lambda number, _: seen.append(number))
    stop = StopRequest(
        exit_interval=None, exit_duration_in_mins=None, exit_signal=signal.SIGTERM, report=seen.append
    )
    with stop.listening():
        os.kill(os.getpid(), signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, former)
    assert (seen, stop.signal_number) == ([signal.SIGUSR2], 0)
