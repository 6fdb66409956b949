"""Files are created and replaced as a whole, or not at all; only regular files are read."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from megatrain.storage import files

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def failing_chunks() -> Iterator[bytes]:
    yield b"half"
    raise FULL


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_with_the_chunks(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.replace_file(path, [b"first"])
    (tmp_path / "file.tmp").write_bytes(b"left by a killed process")
    files.replace_file(path, iter([b"second", b" time"]))
    assert path.read_bytes() == b"second time"
    assert names(tmp_path) == ["file"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    path, target = tmp_path / "file", tmp_path / "target"
    target.write_bytes(b"of another")
    path.symlink_to(target)
    files.replace_file(path, [b"new"])
    assert (path.read_bytes(), target.read_bytes()) == (b"new", b"of another")
    assert not path.is_symlink()


@pytest.mark.parametrize("write", [files.create_file, files.replace_file])
@pytest.mark.parametrize("fault", ["chunks", "fsync"])
def test_a_failed_write_leaves_the_folder_as_it_was(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Path, Iterable[bytes]], None],
    fault: str,
) -> None:
    def fail(_descriptor: int) -> None:
        raise FULL

    chunks: Iterable[bytes] = failing_chunks()
    if fault == "fsync":
        chunks = [b"whole"]
        monkeypatch.setattr(os, "fsync", fail)
    (tmp_path / "other").write_bytes(b"kept")
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "file", chunks)
    assert names(tmp_path) == ["other"]


def test_a_failed_replacement_keeps_the_former_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"former")
    with pytest.raises(OSError, match="No space"):
        files.replace_file(path, failing_chunks())
    assert path.read_bytes() == b"former"
    assert names(tmp_path) == ["file"]


def test_an_existing_file_is_not_created_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"former")
    with pytest.raises(FileExistsError):
        files.create_file(path, [b"new"])
    assert path.read_bytes() == b"former"


def test_only_regular_files_of_limited_size_are_read(tmp_path: Path) -> None:
    path, pipe = tmp_path / "file", tmp_path / "pipe"
    path.write_bytes(b"12345")
    os.mkfifo(pipe)
    assert files.read_regular(path, max_bytes=5) == b"12345"
    with pytest.raises(OSError, match="5 bytes, more than the limit of 4"):
        files.read_regular(path, max_bytes=4)
    for other in (pipe, tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            files.read_regular(other, max_bytes=5)
