"""One run per --save folder: the second is refused, the lock of a dead run is taken over."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from everyday import nightly
from forked_job import ForkedJob
from run_helpers import ROOT, command_line

import pretrain
from megatrain.config.errors import ConfigError
from megatrain.training.launch import save_lock
from megatrain.training.launch.save_lock import LOCK_NAME, Owner, SaveLock, other_owner


@pytest.fixture
def other_process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def owner_of(pid: int, **changed: str) -> Owner:
    start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    own = Owner.of_this_process()
    return dataclasses.replace(own, pid=pid, process_start=start, command="other run", **changed)


def lock_in(folder: Path, owner: Owner) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / LOCK_NAME).write_bytes(owner.to_bytes())
    return folder / LOCK_NAME


def acquired(folder: Path, **options: float) -> list[str]:
    """Acquire and release the lock; return what was printed."""
    said: list[str] = []
    lock = SaveLock(folder, said.append, **options)
    lock.acquire()
    assert other_owner(folder) is None
    assert Owner.from_bytes((folder / LOCK_NAME).read_bytes()) is not None
    lock.release()
    assert sorted(path.name for path in folder.iterdir()) == []
    return said


def test_a_lock_exists_while_it_is_held(tmp_path: Path) -> None:
    assert acquired(tmp_path / "new" / "folder") == []


def test_the_names_of_new_folders_are_flushed_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(save_lock, "fsync_folder", flushed.append)
    acquired(tmp_path / "new" / "folder")
    assert flushed == [tmp_path / "new" / "folder", tmp_path / "new", tmp_path]


def test_a_second_run_is_refused(tmp_path: Path, other_process: subprocess.Popen[bytes]) -> None:
    owner = owner_of(other_process.pid)
    lock_in(tmp_path, owner)
    assert other_owner(tmp_path) is not None
    with pytest.raises(ConfigError) as caught:
        acquired(tmp_path)
    message = str(caught.value)
    assert "--save" in message
    assert f"process {other_process.pid} on {Owner.of_this_process().host}" in message
    assert "other run" in message
    assert (tmp_path / LOCK_NAME).read_bytes() == owner.to_bytes()


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        owner = owner_of(process.pid)
        process.kill()
        time.sleep(0.2)  # it is a zombie now
        lock_in(tmp_path, owner)
        assert other_owner(tmp_path) is None
        assert "taken over" in acquired(tmp_path)[-1]
    lock_in(tmp_path, owner)
    (said,) = acquired(tmp_path)
    assert f"process {owner.pid} on" in said


def test_another_process_with_the_same_id_does_not_hold_the_lock(
    tmp_path: Path, other_process: subprocess.Popen[bytes]
) -> None:
    lock_in(tmp_path, dataclasses.replace(owner_of(other_process.pid), process_start="1"))
    assert "taken over" in acquired(tmp_path)[-1]


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 50_000, b'{"pid": 1}', b"\xff" * 100])
def test_a_damaged_lock_is_stale_without_a_touch(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK_NAME).write_bytes(content)
    said = acquired(tmp_path, stale_seconds=0.2)
    assert "watching" in said[0]
    assert "taken over" in said[1]


def test_a_run_on_another_machine_is_judged_by_its_touches(tmp_path: Path) -> None:
    elsewhere = owner_of(os.getpid(), machine="another boot id", host="node7")
    path = lock_in(tmp_path, elsewhere)
    assert other_owner(tmp_path) is not None
    stop = threading.Event()

    def touch() -> None:
        while not stop.wait(0.1):
            os.utime(path)

    thread = threading.Thread(target=touch)
    thread.start()
    with pytest.raises(ConfigError, match="node7"):
        acquired(tmp_path, stale_seconds=30)
    stop.set()
    thread.join()
    said = acquired(tmp_path, stale_seconds=0.5)
    assert "node7" in said[0]
    assert "taken over" in said[1]


def test_a_lock_is_touched(tmp_path: Path) -> None:
    lock = SaveLock(tmp_path, print, touch_seconds=0.05)
    lock.acquire()
    os.utime(tmp_path / LOCK_NAME, (1, 1))
    deadline = time.monotonic() + 10
    while (tmp_path / LOCK_NAME).stat().st_mtime < 100 and time.monotonic() < deadline:
        time.sleep(0.02)
    lock.release()
    assert time.monotonic() < deadline


def test_a_lock_that_was_removed_is_created_again(tmp_path: Path) -> None:
    again, lines = threading.Event(), list[str]()
    lock = SaveLock(tmp_path, lambda line: (lines.append(line), again.set())[1], touch_seconds=0.05)
    lock.acquire()
    content = (tmp_path / LOCK_NAME).read_bytes()
    (tmp_path / LOCK_NAME).unlink()
    assert again.wait(10)
    assert (tmp_path / LOCK_NAME).read_bytes() == content
    assert "was removed during the run" in lines[0]
    lock.release()
    assert not (tmp_path / LOCK_NAME).exists()


def test_a_run_that_lost_its_lock_ends(tmp_path: Path) -> None:
    lost = threading.Event()
    problems: list[str] = []
    lock = SaveLock(
        tmp_path, print, touch_seconds=0.05, on_loss=lambda text: (problems.append(text), lost.set())[1]
    )
    lock.acquire()
    other = lock_in(tmp_path, owner_of(os.getpid(), machine="another boot id"))
    assert lost.wait(10)
    assert "taken over by another run" in problems[0]
    lock.release()
    assert other.exists()


@pytest.mark.parametrize("num_starts", [3, nightly(30)])
def test_of_many_starts_one_has_the_lock(tmp_path: Path, num_starts: int) -> None:
    """Each start takes over the lock of a dead run, or is refused."""
    lock_in(tmp_path, dataclasses.replace(Owner.of_this_process(), process_start="1"))
    program = (
        "import sys, pathlib, time\n"
        "from megatrain.training.launch.save_lock import SaveLock\n"
        "from megatrain.config.errors import ConfigError\n"
        "lock = SaveLock(pathlib.Path(sys.argv[1]), lambda _: None)\n"
        "sys.stdin.readline()\n"
        "try: lock.acquire()\n"
        "except ConfigError: print('refused', flush=True)\n"
        "else: print('acquired', flush=True)\n"
        "sys.stdin.readline()\n"
        "lock.release()\n"
    )
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        for _ in range(num_starts)
    ]
    for line in ("go\n", "end\n"):
        for process in starts:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        if line == "go\n":
            answers = [process.stdout.readline().strip() for process in starts if process.stdout]
    for process in starts:
        process.communicate()
    assert sorted(answers) == ["acquired"] + ["refused"] * (num_starts - 1)


def test_two_runs_with_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first trains on undisturbed; once it was killed, the second takes over."""
    flags = command_line({"--save": str(tmp_path), "--load": str(tmp_path), "--train-iters": "100000"})
    first = ForkedJob(flags, 1, tmp_path)
    first.wait_for_iteration(tmp_path / "metrics.jsonl", 3)
    status, config = (tmp_path / "status.json").read_bytes(), (tmp_path / "config.yaml").read_bytes()
    assert pretrain.main(flags) == 2
    error = capsys.readouterr().err
    assert f"process {first.pids[0]} on" in error
    assert "fix:" in error
    assert (tmp_path / "status.json").read_bytes() == status
    assert (tmp_path / "config.yaml").read_bytes() == config
    first.kill(0)
    first.wait()
    code = pretrain.main(command_line({"--save": str(tmp_path), "--load": str(tmp_path)}))
    assert code == 0
    assert f"taken over: its run has ended: process {first.pids[0]}" in capsys.readouterr().out
    assert not (tmp_path / LOCK_NAME).exists()
    assert json.loads((tmp_path / "status.json").read_text())["exit_code"] == 0


@pytest.mark.parametrize("kind", ["global", "local"])
def test_two_runs_with_one_folder_of_non_persistent_checkpoints(
    tmp_path: Path, other_process: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    save, fast, flag = tmp_path / "run", tmp_path / "fast", f"--non-persistent-{kind}-ckpt-dir"
    changed: dict[str, str | None] = {
        "--save": str(save),
        flag: str(fast),
        "--non-persistent-ckpt-type": kind,
    }
    flags = command_line({**changed, "--non-persistent-save-interval": "1"})
    lock_in(fast, owner_of(other_process.pid))
    assert pretrain.main(flags) == 2
    error = capsys.readouterr().err
    assert f"{flag} {fast} is used by another run: process {other_process.pid} on" in error
    assert sorted(path.name for path in fast.iterdir()) == [LOCK_NAME]
    assert not (save / LOCK_NAME).exists()
    assert pretrain.main(command_line(changed)) == 0  # it saves nothing there
    shutil.rmtree(save)
    (fast / LOCK_NAME).unlink()
    assert pretrain.main(flags) == 0
    assert not (fast / LOCK_NAME).exists()


def test_one_folder_under_two_names_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "run").mkdir()
    changed: dict[str, str | None] = {
        "--save": str(tmp_path / "run"), "--non-persistent-ckpt-type": "global",
        "--non-persistent-save-interval": "1", "--non-persistent-global-ckpt-dir": str(tmp_path / "link"),
    }  # fmt: skip
    assert pretrain.main(command_line(changed)) == 2
    assert "have the same folder" in capsys.readouterr().err


def test_a_failed_run_releases_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ConfigError("planted", fix="none")

    monkeypatch.setattr("megatrain.training.trainer.Trainer.resume", fail)
    assert pretrain.main(command_line({"--save": str(tmp_path)})) == 2
    assert not (tmp_path / LOCK_NAME).exists()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save_lock.os, "fsync", fail)
    with pytest.raises(ConfigError, match=r"--save .*errno 28.* bytes free"):
        SaveLock(tmp_path, print).acquire()
    assert not list(tmp_path.iterdir())
