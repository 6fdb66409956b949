"""Logs on a full disk: the run saves and stops with an error, or continues without that log; the status is never left open."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_helpers import command_line

import pretrain
from megatrain.checkpoint.find import newest_valid
from megatrain.storage import files
from megatrain.training.logging import metrics_file, status_file
from megatrain.training.logging.status_file import write_status

FULL = OSError(errno.ENOSPC, "No space left on device")


def run(folder: Path, **changed: str) -> int:
    flags: dict[str, str | None] = {"--train-iters": "6", "--save": str(folder), "--load": str(folder)}
    return pretrain.main(command_line(flags, **changed))


def status_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "status.json").read_text())


@pytest.fixture
def full_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Returns a function that lets this many lines of metrics succeed."""

    def fill(num_lines: int) -> None:
        calls: list[int] = []

        def write_all(descriptor: int, data: bytes) -> None:
            calls.append(descriptor)
            if len(calls) > num_lines:
                raise FULL
            files.write_all(descriptor, data)

        monkeypatch.setattr(metrics_file, "write_all", write_all)

    return fill


def test_the_run_saves_and_stops(
    tmp_path: Path,
    full_after: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full_after(2)
    assert run(tmp_path) == 1
    error = capsys.readouterr().err
    assert str(tmp_path / "metrics.jsonl") in error
    assert "errno 28" in error
    assert "bytes needed" in error
    assert "bytes free" in error
    assert "--on-log-failure warn" in error
    assert "Traceback" not in error
    newest = newest_valid(tmp_path)
    assert newest is not None
    assert 3 <= newest.iteration < 6
    assert f"iteration {newest.iteration} is saved" in error
    assert status_of(tmp_path)["exit_code"] == 1
    assert "metrics.jsonl" in status_of(tmp_path)["reason"]
    monkeypatch.undo()
    assert run(tmp_path) == 0


def test_a_failure_at_the_end_is_no_success(tmp_path: Path, full_after: Callable[[int], None]) -> None:
    full_after(5)
    assert run(tmp_path) == 1
    newest = newest_valid(tmp_path)
    assert newest is not None
    assert newest.iteration == 6


def test_the_run_continues_without_metrics(
    tmp_path: Path, full_after: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    full_after(2)
    assert run(tmp_path, on_log_failure="warn") == 0
    captured = capsys.readouterr()
    assert captured.out.count("WARNING: no more is written to a log") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert status_of(tmp_path)["exit_code"] == 0


@pytest.mark.parametrize(("policy", "exit_code", "saved"), [("stop", 1, 4), ("warn", 0, 6)])
def test_a_removed_save_folder_is_noticed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    policy: str,
    exit_code: int,
    saved: int,
) -> None:
    """Lines in a file without a name would be lost in silence; the run saves, which makes the folder again."""
    calls: list[int] = []

    def write_all(descriptor: int, data: bytes) -> None:
        files.write_all(descriptor, data)
        calls.append(descriptor)
        if len(calls) == 2:
            shutil.rmtree(tmp_path / "run")

    monkeypatch.setattr(metrics_file, "write_all", write_all)
    assert run(tmp_path / "run", on_log_failure=policy) == exit_code
    shown = capsys.readouterr()
    assert f"{tmp_path}/run/metrics.jsonl: the file was removed" in (
        shown.out if policy == "warn" else shown.err
    )
    newest = newest_valid(tmp_path / "run")
    assert newest is not None
    assert newest.iteration == saved


def test_metrics_that_cannot_be_opened_stop_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = os.open

    def fail(path: Any, *args: Any, **more: Any) -> int:
        if str(path).endswith("metrics.jsonl"):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return opened(path, *args, **more)

    monkeypatch.setattr(metrics_file.os, "open", fail)
    assert run(tmp_path) == 1
    assert "errno 30" in capsys.readouterr().err
    assert status_of(tmp_path)["exit_code"] == 1
    assert run(tmp_path, on_log_failure="warn") == 0


def test_tensorboard_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter

    def fail(*_: object, **__: object) -> None:
        raise FULL

    monkeypatch.setattr(writer, "add_scalar", fail)
    folder = tmp_path / "curves"
    assert run(tmp_path / "run", tensorboard_dir=str(folder)) == 1
    assert f"--tensorboard-dir {folder}" in capsys.readouterr().err
    assert newest_valid(tmp_path / "run") is not None
    assert run(tmp_path / "other", tensorboard_dir=str(folder), on_log_failure="warn") == 0


@pytest.mark.parametrize("is_in_place_possible", [True, False])
def test_a_status_on_a_full_disk_is_not_left_open(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    is_in_place_possible: bool,
) -> None:
    write_status(tmp_path, exit_code=None, reason="running", iteration=1)

    def fail(*_: object) -> None:
        raise FULL

    monkeypatch.setattr(status_file, "replace_file", fail)
    if not is_in_place_possible:
        monkeypatch.setattr(status_file, "write_all", fail)
    write_status(tmp_path, exit_code=1, reason="disk full", iteration=2)
    error = capsys.readouterr().err
    assert "status.json" in error
    assert "bytes needed" in error
    if is_in_place_possible:
        assert status_of(tmp_path)["exit_code"] == 1
    else:
        assert not (tmp_path / "status.json").exists()


def test_a_link_in_place_of_the_temporary_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("status.json.tmp", "status.json"):
        (tmp_path / name).symlink_to(victim)
    write_status(tmp_path, exit_code=0, reason="ok", iteration=2)
    assert victim.read_text() == "mine"
    assert status_of(tmp_path)["exit_code"] == 0
    assert not (tmp_path / "status.json.tmp").exists()
