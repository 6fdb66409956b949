"""TensorBoard and W&B (trackers: `test_trackers.py`): names of curves, resuming, and errors that do not stop a run."""

import json
import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
from metrics_files import logged_lines
from run_helpers import ROOT, command_line, started, wait_for
from test_run_log import VALUES

import pretrain
from megatrain.config import LoggingConfig
from megatrain.training.logging.curves import (
    evaluation_scalars,
    is_also_over_samples,
    iteration_scalars,
)
from megatrain.training.logging.trackers import TrackerCurves, Wandb

MEMORY = {"memory_bytes": 1, "reserved_memory_bytes": 2, "max_memory_bytes": 3}


def test_names_are_megatrons() -> None:
    logging = LoggingConfig(
        log_timers_to_tensorboard=True, log_memory_to_tensorboard=True, log_throughput=True,
        log_world_size_to_tensorboard=True, log_validation_ppl_to_tensorboard=True,
    )  # fmt: skip
    found = iteration_scalars({**VALUES, **MEMORY, "decoupled_learning_rate": 2e-4}, logging, world_size=8)
    assert set(found) == {
        "learning-rate", "decoupled-learning-rate", "batch-size", "lm loss", "grad-norm", "num-zeros", "params-norm",
        "max-attention-logit", "samples vs steps",
        "loss-scale", "world-size", "throughput", "iteration-time", "optimizer-time", "mem-allocated-bytes",
        "mem-reserved-bytes", "mem-max-allocated-bytes",
    }  # fmt: skip
    assert found["iteration-time"] == 0.1
    only_over_iterations = {name for name in found if not is_also_over_samples(name)}
    assert only_over_iterations == {
        "samples vs steps", "throughput", "iteration-time", "optimizer-time", "mem-allocated-bytes",
        "mem-reserved-bytes", "mem-max-allocated-bytes", "decoupled-learning-rate",
    }  # fmt: skip
    evaluation = {"loss": 2.0, "ppl": 7.4}
    assert evaluation_scalars(evaluation, logging, split="valid", dataset=None) == {
        "lm loss validation": 2.0, "lm loss validation ppl": 7.4,
    }  # fmt: skip
    of_family = {**evaluation, "sop_loss": 0.7, "token_accuracy": 0.5}
    assert set(evaluation_scalars(of_family, LoggingConfig(), split="valid", dataset="code")) == {
        "lm loss validation-code", "sop loss validation-code", "token accuracy validation-code",
    }  # fmt: skip


def test_numbers_that_are_none_are_left_out() -> None:
    values = {**VALUES, "num_zeros": None, "lm_loss": float("nan")}
    found = iteration_scalars(values, LoggingConfig(log_loss_scale_to_tensorboard=False), world_size=1)
    assert not {"num-zeros", "lm loss", "loss-scale", "throughput"} & set(found)


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return every point of every event file."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.glob("events.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, float(make_ndarray(value.tensor))))
    return found


@pytest.mark.filterwarnings("ignore")  # TensorBoard's own
def test_tensorboard_has_each_point_once_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = tmp_path / "curves"
    flags: dict[str, str | None] = {
        "--save": str(tmp_path / "run"), "--load": str(tmp_path / "run"), "--save-interval": "2",
        "--train-iters": "6", "--eval-interval": "3", "--eval-iters": "1", "--global-batch-size": "2",
        "--tensorboard-dir": str(folder), "--lr-decay-iters": "9",
    }  # fmt: skip
    assert pretrain.main(command_line({**flags, "--exit-interval": "5"})) == 75
    other = {**flags, "--save": None, "--load": None, "--save-interval": None}
    assert pretrain.main(command_line(other)) == 0  # another run in the same folder
    before = points(folder)["lm loss"]
    for newest in sorted((tmp_path / "run").glob("iter_*"))[1:]:  # as if killed after iteration 2
        for file in newest.iterdir():
            file.unlink()
        newest.rmdir()
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("2")
    assert pretrain.main(command_line(flags)) == 0
    found = points(folder)
    assert sorted(step for step, _ in found["lm loss"]) == sorted([*range(1, 7)] * 2)
    assert sorted(step for step, _ in found["lm loss vs samples"]) == sorted([*range(2, 13, 2)] * 2)
    assert sorted(step for step, _ in found["lm loss validation"]) == [3, 3, 6, 6]
    assert set(before) <= set(found["lm loss"])
    assert dict(found["batch-size"])[1] == 2.0


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # TensorBoard's own
def test_a_killed_run_has_its_points_up_to_the_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    save = tmp_path / "run"
    flags: dict[str, str | None] = {
        "--save": str(save), "--load": str(save), "--save-interval": "20", "--train-iters": "100000",
        "--tensorboard-dir": str(tmp_path / "curves"),
    }  # fmt: skip
    with started([sys.executable, "pretrain.py", *command_line(flags)], cwd=ROOT):
        wait_for(save / "latest_checkpointed_iteration.txt", lines=1)
    time.sleep(1.1)  # TensorBoard orders event files by the second of their start, then by process
    saved = int((save / "latest_checkpointed_iteration.txt").read_text())
    assert pretrain.main(command_line({**flags, "--exit-interval": "50"})) == 75
    steps = [step for step, _ in points(tmp_path / "curves")["lm loss"]]
    assert len(steps) > saved
    assert steps == list(range(1, len(steps) + 1))


class FakeRun:
    def __init__(self, *, fails: bool) -> None:
        self.id = "abc123"
        self.fails = fails
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.is_finished = False

    def log(self, values: dict[str, float], *, step: int) -> None:
        if self.fails and step == 2:
            raise ConnectionError("the network is down")
        self.logged.append((step, values))

    def finish(self) -> None:
        self.is_finished = True


def fake_wandb(
    monkeypatch: pytest.MonkeyPatch, *, fails: bool = False
) -> tuple[list[dict[str, Any]], FakeRun]:
    """Replace the package wandb by one that records its calls."""
    calls: list[dict[str, Any]] = []
    run = FakeRun(fails=fails)

    def init(**arguments: Any) -> FakeRun:
        calls.append(arguments)
        return run

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    monkeypatch.setattr("megatrain.training.launch.facts.library_versions", lambda: {"wandb": "0.0"})
    return calls, run


def test_wandb_gets_the_curves_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-secret")
    calls, run = fake_wandb(monkeypatch)
    flags: dict[str, str | None] = {
        "--wandb-project": "p", "--wandb-exp-name": "n", "--wandb-entity": "e", "--eval-iters": "1",
        "--save": str(tmp_path), "--load": str(tmp_path), "--lr-decay-iters": "9",
    }  # fmt: skip
    assert pretrain.main(command_line(flags)) == 0
    assert pretrain.main(command_line({**flags, "--train-iters": "3"})) == 0
    first, second = calls
    assert (first["project"], first["name"], first["entity"], first["id"]) == ("p", "n", "e", None)
    assert first["dir"] == str(tmp_path / "wandb")
    assert second["id"] == "abc123"
    assert "a-secret" not in str(calls) + (tmp_path / "config.yaml").read_text()
    assert first["config"]["model"]["num_layers"] == 4
    assert [step for step, values in run.logged if "lm loss" in values] == [1, 2, 3]
    assert {"lm loss validation", "consumed samples"} <= {name for _, values in run.logged for name in values}
    assert run.is_finished


WANDB = """
import json, os

class Run:
    def __init__(self, id):
        self.id = id

    def log(self, values, step):
        with open(os.environ["CURVE"], "a") as file:
            file.write(json.dumps({"id": self.id, "step": step, "loss": values.get("lm loss")}) + "\\n")

    def finish(self):
        pass

def init(id, **_):
    return Run(id or f"run-{os.getpid()}")
"""


def write_wandb(folder: Path, source: str) -> None:
    """Write a package wandb with this source, which counts as installed."""
    (folder / "wandb.py").write_text(source)
    (folder / "wandb-0.0.dist-info").mkdir()
    (folder / "wandb-0.0.dist-info" / "METADATA").write_text("Name: wandb\nVersion: 0.0\n")


@pytest.mark.nightly  # test_wandb_gets_the_curves resumes within this process
def test_a_killed_run_continues_its_run_of_wandb(tmp_path: Path) -> None:
    """One id; points that are logged again, after those that the kill left, have the same values."""
    write_wandb(tmp_path, WANDB)
    save, curve = tmp_path / "run", tmp_path / "curve.jsonl"
    flags: dict[str, str | None] = {
        "--save": str(save), "--load": str(save), "--save-interval": "20", "--train-iters": "100000",
        "--wandb-project": "p", "--lr-decay-iters": "100",
    }  # fmt: skip
    environment = os.environ | {
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "CURVE": str(curve),
        "WANDB_MODE": "offline",
    }
    command = [sys.executable, "pretrain.py", *command_line(flags)]
    with started(command, cwd=ROOT, env=environment):
        wait_for(save / "latest_checkpointed_iteration.txt", lines=1)
    killed_at = len(curve.read_text().splitlines())
    assert (
        subprocess.run([*command, "--exit-interval", "60"], cwd=ROOT, env=environment, check=False).returncode
        == 75
    )
    found = [json.loads(line) for line in curve.read_text().splitlines()]
    assert len(found) > killed_at
    assert {point["id"] for point in found} == {(save / "wandb_run_id.txt").read_text().strip()}
    losses: dict[int, float] = {}
    for point in found:
        assert losses.setdefault(point["step"], point["loss"]) == point["loss"]
    assert sorted(losses) == list(range(1, max(losses) + 1))


def test_an_error_of_wandb_is_reported_once_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, run = fake_wandb(monkeypatch, fails=True)
    assert pretrain.main(command_line({"--wandb-project": "p", "--train-iters": "5"})) == 0
    out = capsys.readouterr().out
    assert out.count("> warning: W&B") == out.count("ConnectionError: the network is down") == 1
    assert [step for step, _ in run.logged] == [1]


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_wandb_that_cannot_start_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: type[BaseException]
) -> None:
    def init(**_: Any) -> None:
        raise error("no key")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    warnings: list[str] = []
    tracker = Wandb(LoggingConfig(wandb_project="p"), tmp_path, {})
    curves = TrackerCurves(tracker, save_folder=None, warn=warnings.append)
    curves.write({"lm loss": 1.0}, iteration=1, consumed_samples=1)
    curves.close()
    assert len(warnings) == 1
    assert f"{error.__name__}: no key" in warnings[0]


HANGING_WANDB = """
import atexit, threading

class Run:
    id = "abc123"

    def log(self, values, step):
        threading.Event().wait()

def init(**_):
    atexit.register(threading.Event().wait)
    return Run()
"""


def test_wandb_that_hangs_stops_neither_the_run_nor_its_end(tmp_path: Path) -> None:
    write_wandb(tmp_path, HANGING_WANDB)
    start = "import sys, pretrain; from megatrain.training.logging.trackers import TrackerCurves as W;"
    start += "W.__init__.__kwdefaults__['seconds_to_finish'] = 0.2; sys.exit(pretrain.main())"
    flags: dict[str, str | None] = {"--wandb-project": "p", "--train-iters": "5", "--exit-interval": "3"}
    ended = subprocess.run(
        [sys.executable, "-c", start, *command_line(flags)], cwd=ROOT, check=False, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 75, ended.stderr
    assert ended.stdout.count("W&B is disabled for the rest of the run: it did not finish within 0.2 s") == 1
    assert "ended at iteration 3" in ended.stdout


def test_points_that_wandb_does_not_take_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("megatrain.training.logging.trackers._MAX_WAITING_POINTS", 3)
    taken, is_over = threading.Event(), threading.Event()

    def init(**_: Any) -> None:
        taken.set()
        is_over.wait()
        raise TimeoutError

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    warnings: list[str] = []
    tracker = Wandb(LoggingConfig(wandb_project="p"), tmp_path, {})
    curves = TrackerCurves(tracker, save_folder=None, warn=warnings.append)
    assert taken.wait(10)
    for iteration in range(1, 9):
        curves.write({"lm loss": 1.0}, iteration=iteration, consumed_samples=1)
    curves.close()
    assert len(warnings) == 1
    assert "3 points wait for it" in warnings[0]
    is_over.set()


def history_of(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return id and values of each point in W&B's files, which have the log format of LevelDB."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        content, at, record = path.read_bytes(), 7, b""
        while at + 7 <= len(content):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
            record += content[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # a whole record, or its last part
                items = wandb_internal_pb2.Record.FromString(record).history.item
                values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
                found += [(path.stem, values)] if values else []
                record = b""
    return found


def test_wandb_offline_has_the_values_of_the_metrics_file_and_no_secret(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    flags: dict[str, str | None] = {
        "--save": str(tmp_path), "--load": str(tmp_path), "--wandb-project": "p", "--lr-decay-iters": "9",
        "--train-iters": "5",
    }  # fmt: skip
    secrets = {"WANDB_API_KEY": "0123456789" * 4, "OTHER_TOKEN": "a-hidden-token"}
    environment = os.environ | secrets | {"WANDB_MODE": "offline"}
    command = [sys.executable, "pretrain.py", *command_line(flags)]
    assert (
        subprocess.run([*command, "--exit-interval", "3"], cwd=ROOT, env=environment, check=False).returncode
        == 75
    )
    assert subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0
    lines = logged_lines(tmp_path)
    names = {"lm_loss": "lm loss", "grad_norm": "grad-norm", "consumed_samples": "consumed samples"}
    points = history_of(tmp_path / "wandb")
    assert (
        [values["_step"] for _, values in points] == [line["iteration"] for line in lines] == [1, 2, 3, 4, 5]
    )
    for (_, values), line in zip(points, lines, strict=True):
        assert {name: values[curve] for name, curve in names.items()} == {name: line[name] for name in names}
    assert len({run for run, _ in points}) == 1
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert not [name for name, secret in secrets.items() if secret.encode() in written]
