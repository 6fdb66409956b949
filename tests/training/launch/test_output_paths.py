"""A --save that cannot be written is found before anything is built: exit code 2, path, errno and remedy."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from run_helpers import command_line

import pretrain
from megatrain.training.launch import save_lock


@pytest.fixture
def nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        pytest.fail("the trainer was built")

    monkeypatch.setattr("megatrain.training.trainer.Trainer.__init__", fail)


def free_bytes(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr("megatrain.storage.disk.Disk.free_bytes", lambda *_: free)


def size_of_checkpoint(folder: Path) -> int:
    assert pretrain.main(command_line({"--save": str(folder)})) == 0
    return sum(path.stat().st_size for path in folder.glob("iter_*/*.safetensors"))


def test_space_for_a_checkpoint_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = size_of_checkpoint(tmp_path / "first")
    free_bytes(monkeypatch, size)
    assert pretrain.main(command_line({"--save": str(tmp_path / "second")})) == 2
    error = capsys.readouterr().err
    assert f"{size:,} bytes free" in error
    assert "--save" in error
    assert "fix: free some space" in error
    assert not (tmp_path / "second" / "metrics.jsonl").exists()
    free_bytes(monkeypatch, 2 * size)
    assert pretrain.main(command_line({"--save": str(tmp_path / "second")})) == 0
    assert "a second one does not fit" in capsys.readouterr().out
    free_bytes(monkeypatch, 3 * size)
    assert pretrain.main(command_line({"--save": str(tmp_path / "third")})) == 0
    assert "does not fit" not in capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], save: object, **more: str) -> str:
    assert pretrain.main(command_line({"--save": str(save), **more})) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert f"--save {save}" in error
    assert "fix:" in error
    return error


@pytest.mark.usefixtures("nothing_is_built")
def test_a_file_in_place_of_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert "not a folder" in refused(capsys, tmp_path / "file")
    assert "not a folder" in refused(capsys, tmp_path / "file" / "below" / "it")


@pytest.mark.usefixtures("nothing_is_built")
def test_a_dangling_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    assert "link to" in refused(capsys, tmp_path / "link")
    assert "link" in refused(capsys, tmp_path / "link" / "below")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.usefixtures("nothing_is_built")
def test_a_folder_that_no_one_can_create(capsys: pytest.CaptureFixture[str]) -> None:
    assert "errno" in refused(capsys, "/proc/no/such/folder")


@pytest.mark.usefixtures("nothing_is_built")
def test_names_that_the_file_system_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = tmp_path / ("x" * 300)
    assert "File name too long" in refused(capsys, long)
    assert pretrain.main(command_line({"--exit-file": str(long)})) == 2
    error = capsys.readouterr().err
    assert f"--exit-file {long}" in error
    assert "File name too long" in error


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("mode", [0o000, 0o500])
def test_a_forbidden_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: int) -> None:
    folder = tmp_path / "forbidden"
    folder.mkdir()
    folder.chmod(mode)
    assert "errno 13" in refused(capsys, folder)
    assert "errno 13" in refused(capsys, folder / "below")
    folder.chmod(0o700)


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("operation", ["open", "fsync"])
def test_a_folder_that_cannot_be_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    number: int,
) -> None:
    place: Any = os if operation == "fsync" else Path
    original = getattr(place, operation)

    def fail(target: Any, *args: Any, **more: Any) -> Any:
        if operation == "fsync" or str(target).endswith(save_lock.LOCK_NAME):
            raise OSError(number, os.strerror(number))
        return original(target, *args, **more)

    monkeypatch.setattr(place, operation, fail)
    monkeypatch.setattr("megatrain.training.launch.refusal.write_refused_start", lambda *_, **__: None)
    error = refused(capsys, tmp_path)
    assert f"errno {number}" in error
    assert str(tmp_path / save_lock.LOCK_NAME) in error
    assert ("bytes free" in error) == (number in (errno.ENOSPC, errno.EDQUOT))


@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "status.json", "run.lock", "iter_0000001/manifest.json"])
def test_a_file_of_the_run_that_is_no_regular_file_blocks_nothing(
    tmp_path: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if kind == "device":
        path.symlink_to("/dev/zero")
    else:
        os.mknod(path, (stat.S_IFIFO if kind == "pipe" else stat.S_IFSOCK) | 0o600)
    code = pretrain.main(command_line({"--save": str(tmp_path)}))
    if name in ("metrics.jsonl", "run.lock"):
        assert code == 2
        error = capsys.readouterr().err
        assert str(path) in error
        assert "not a regular file" in error or "symbolic link" in error
    else:
        assert code == 0
        assert json.loads((tmp_path / "status.json").read_text())["exit_code"] == 0
