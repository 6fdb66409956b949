"""Requests to stop: a file, and a second signal to a run whose main thread is blocked."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from everyday import one_in
from forked_job import ForkedJob
from run_helpers import LIMIT_SECONDS, ROOT, command_line, started, wait_for

import pretrain
from megatrain.training import stopping
from megatrain.training.engine import Engine
from megatrain.training.logging import console
from megatrain.training.logging.console import Phases
from megatrain.training.stopping import StopRequest

Start = Callable[..., subprocess.Popen[Any]]

BLOCKED = """
import ctypes, sys, time
from megatrain.process import signals
from megatrain.training import stopping
signals._SECONDS_OF_REPEATED_SIGNALS = 0.2
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
    with started(words, env=environment, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lines, lines=1)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)  # within moments: it counts as the same request
        wait_for(lines, lines=2)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_SECONDS)
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
    assert stop.flags() == (0, 0, 0, 0, 0)
    (tmp_path / "x").touch()
    assert stop.flags() == (0, 0, 0, 0, 0)


def test_the_time_limit_counts_from_the_start_of_the_program() -> None:
    now = time.monotonic()
    for began, is_late in ((now - 61, 1), (now - 50, 0), (None, 0)):
        stop = StopRequest(exit_interval=None, exit_duration_in_mins=1, began=began, exit_signal=15)
        assert stop.flags() == (0, is_late, 0, 0, 0)


def test_a_run_whose_start_took_longer_than_its_time_limit_stops_after_an_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "Phases", lambda one: Phases(one, began=time.monotonic() - 3600))
    save = tmp_path / "run"
    flags = {"--save": str(save), "--load": str(save), "--exit-duration-in-mins": "10"}
    assert pretrain.main(command_line(flags)) == 75
    status = json.loads((save / "status.json").read_text())
    assert (status["iteration"], status["reason"]) == (1, "--exit-duration-in-mins is over")


def test_a_file_system_that_fails_for_a_moment_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "_SECONDS_BETWEEN_LOOKS", 0.0)
    too_long = tmp_path / ("x" * 300)  # the system call fails
    stop = StopRequest(exit_interval=None, exit_duration_in_mins=None, exit_signal=15, exit_file=too_long)
    assert stop.flags() == (0, 0, 0, 0, 0)
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
    assert (seen, stop.signals.number) == ([signal.SIGUSR2], 0)


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_closed_terminal_is_a_request_unless_it_is_ignored(handler: signal.Handlers) -> None:
    """As it is under nohup."""
    former = signal.signal(signal.SIGHUP, handler)
    stop = StopRequest(exit_interval=None, exit_duration_in_mins=None, exit_signal=signal.SIGTERM)
    with stop.listening():
        os.kill(os.getpid(), signal.SIGHUP)
        deadline = time.monotonic() + (5 if handler == signal.SIG_DFL else 0.2)
        while not stop.signals.number and time.monotonic() < deadline:
            time.sleep(0.01)
    signal.signal(signal.SIGHUP, former)
    assert stop.signals.number == (signal.SIGHUP if handler == signal.SIG_DFL else 0)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start runs that save to `tmp_path / "run"`, with words `before` the command, and stderr in `tmp_path / "errors"`."""

    def run(flags: dict[str, str | None], *before: str, **streams: Any) -> subprocess.Popen[Any]:
        flags = {"--save": str(tmp_path / "run"), "--train-iters": "3000", "--log-interval": "1"} | flags
        words = [*before, sys.executable, "-u", "pretrain.py", *command_line(flags)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with (tmp_path / "errors").open("w") as errors:
            process = started(words, cwd=ROOT, env=environment, **({"stderr": errors} | streams))
            return processes.enter_context(process)

    with ExitStack() as processes:
        yield run


def assert_saved(folder: Path, process: subprocess.Popen[bytes], reason: str) -> None:
    """Check that a run stopped for this reason after a save, without a traceback."""
    assert process.wait(LIMIT_SECONDS) == 75
    status = json.loads((folder / "run" / "status.json").read_text())
    assert (status["exit_code"], status["reason"]) == (75, reason)
    assert (folder / "run" / f"iter_{status['iteration']:07d}").is_dir()
    assert status["iteration"] < 3000
    assert "Traceback" not in (folder / "errors").read_text()


@pytest.mark.parametrize("is_stderr_closed", one_in(2, [False, True]))
def test_a_closed_console_saves_and_stops_the_run(
    start: Start, tmp_path: Path, is_stderr_closed: bool
) -> None:
    both = {"stderr": subprocess.STDOUT} if is_stderr_closed else {}
    process = start({}, stdout=subprocess.PIPE, **both)
    assert process.stdout is not None
    while b" iteration        1/" not in process.stdout.readline():
        assert process.poll() is None
    process.stdout.close()
    assert_saved(tmp_path, process, "standard output cannot be written")
    if not is_stderr_closed:
        assert "standard output cannot be written: Broken pipe" in (tmp_path / "errors").read_text()


@pytest.mark.nightly  # test_log_failures has one within this process
def test_a_full_disk_under_the_console_ends_no_run_that_need_not_log(start: Start, tmp_path: Path) -> None:
    flags = {"--train-iters": "3", "--on-log-failure": "warn"}
    with Path("/dev/full").open("w") as full:
        process = start(flags, stdout=full)
        assert process.wait(LIMIT_SECONDS) == 0
    assert (tmp_path / "errors").read_text() == (
        "error: standard output cannot be written: No space left on device (errno 28)\n"
    )
    assert (tmp_path / "run" / "iter_0000003").is_dir()


def test_a_run_without_standard_streams_trains(tmp_path: Path) -> None:
    def close(_: int) -> None:
        sys.stdin = sys.stdout = sys.stderr = None  # type: ignore[assignment]  # as Python starts without them
        os.closerange(0, 3)

    flags = command_line({"--train-iters": "2", "--save": str(tmp_path / "run")})
    job = ForkedJob(flags, 1, tmp_path, close)
    job.wait()
    assert job.exit_codes == {0: 0}
    assert (tmp_path / "run" / "iter_0000002").is_dir()


@pytest.mark.nightly
def test_a_program_without_standard_streams_trains(start: Start, tmp_path: Path) -> None:
    process = start({"--train-iters": "2"}, "bash", "-c", '"$@" <&- >&- 2>&-', "bash")
    assert process.wait(LIMIT_SECONDS) == 0
    assert (tmp_path / "run" / "iter_0000002").is_dir()


@pytest.mark.nightly
def test_a_closed_terminal_saves_and_stops_the_run_unless_it_is_started_by_nohup(
    start: Start, tmp_path: Path
) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    process = start({}, "env", "--default-signal=HUP", stdout=subprocess.DEVNULL)
    wait_for(metrics, lines=1)
    process.send_signal(signal.SIGHUP)
    assert_saved(tmp_path, process, "signal SIGHUP")
    more: dict[str, str | None] = {"--load": str(tmp_path / "run")}
    process = start(more, "env", "--ignore-signal=HUP", stdout=subprocess.DEVNULL)
    wait_for(metrics, lines=len(metrics.read_text().splitlines()) + 1)
    process.send_signal(signal.SIGHUP)
    wait_for(metrics, lines=len(metrics.read_text().splitlines()) + 3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert_saved(tmp_path, process, "signal SIGTERM")


def catches_signals(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process has its handlers: Python alone does not catch SIGTERM."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("seed", one_in(60, range(60)))
def test_a_signal_at_any_moment_of_the_start_is_not_lost(start: Start, tmp_path: Path, seed: int) -> None:
    moments = random.Random(seed)
    process = start({"--save-interval": "100000"}, stdout=subprocess.DEVNULL)
    while not catches_signals(process):
        assert process.poll() is None
    time.sleep(moments.uniform(0, 8) if seed else 0)
    number = moments.choice((signal.SIGINT, signal.SIGTERM))
    process.send_signal(number)
    assert process.wait(LIMIT_SECONDS) in ((130, 75) if number == signal.SIGINT else (75,))
    assert "Traceback" not in (tmp_path / "errors").read_text()
    status = tmp_path / "run" / "status.json"
    if status.exists():
        assert json.loads(status.read_text())["exit_code"] == process.returncode
