"""A save in the background equals one in the foreground, also if the state changes or the writer or the disk fails meanwhile."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from canonical_weights import hash_tensors
from checkpoint_helpers import (
    Rank,
    a_save,
    assert_same,
    build_ranks,
    load,
    one_rank,
    run_ranks,
    save,
    small_spec,
)
from everyday import nightly

import megatrain
from megatrain.checkpoint import background
from megatrain.checkpoint.background import BackgroundWriter
from megatrain.checkpoint.errors import CheckpointError
from megatrain.checkpoint.reader import verify
from megatrain.parallel.rank_lists import GridShape
from megatrain.storage.disk import Disk

torch.set_num_threads(1)

FAULTY = """
import errno, os, signal, sys, time
from megatrain.storage.disk import Disk
from megatrain.checkpoint.writer_process import serve

class FaultyDisk(Disk):
    def write(self, file, data):
        super().write(file, data)
        {fault}

serve(FaultyDisk())
"""
"""A writer whose disk has a fault at every write."""
FULL = FAULTY.format(fault="raise OSError(errno.ENOSPC, 'No space left on device')")
DYING = FAULTY.format(fault="os.kill(os.getpid(), signal.SIGKILL)")
BROKEN = FAULTY.format(fault="raise ValueError('a mistake of ours')")
FORBIDDEN = FAULTY.format(
    fault="raise PermissionError(13, 'Permission denied', __import__('pathlib').Path('/forbidden'))"
)
SLOW = FAULTY.format(fault="time.sleep(0.2)")
LYING = FAULTY.format(fault="os.pwrite(file.fileno(), b'?', 300)")


@pytest.fixture
def make_writer() -> Iterator[Callable[..., BackgroundWriter]]:
    made: list[BackgroundWriter] = []

    def make(rank: Rank, program: str | None = None, **options: Any) -> BackgroundWriter:
        if program is not None:
            options["program"] = program
        made.append(BackgroundWriter(rank.optimizer, rank.grid, rank.optimizer.kinds, **options))
        return made[-1]

    yield make
    for writer in made:
        writer.close()


def test_changes_after_the_begin_are_not_saved(
    tmp_path: Path, make_writer: Callable[..., BackgroundWriter]
) -> None:
    rank, other = one_rank(seed=3), one_rank(seed=9)
    expected = rank.values()
    writer = make_writer(rank)
    for iteration in (10, 20):
        writer.begin(a_save(tmp_path, rank, iteration))
        rank.set_values(7)
        assert not (tmp_path / f"iter_{iteration:07d}").exists()
        path = writer.commit()
        assert verify(path) == []
        rank.set_values(3)
    other.clear()
    assert load(tmp_path, other).iteration == 20
    assert_same(other.values(), expected)
    assert other.optimizer.step_count == 3


def test_the_files_equal_those_of_a_save_in_the_foreground(
    tmp_path: Path, make_writer: Callable[..., BackgroundWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = one_rank(seed=3)
    writer = make_writer(rank, verifies=True)
    writer.begin(a_save(tmp_path / "one", rank, 10))
    one = writer.commit()
    other = save(tmp_path / "other", rank, 10, config={})
    assert {path.name: path.read_bytes() for path in one.iterdir()} == {
        path.name: path.read_bytes() for path in other.iterdir()
    }


@pytest.mark.parametrize(
    ("shape", "is_sharded"),
    [
        (GridShape(tp=2, pp=2), True),
        *(
            nightly(*case)
            for case in ((GridShape(tp=2, pp=2), False), (GridShape(dp=3), True), (GridShape(dp=3), False))
        ),
    ],
)
def test_all_ranks_together(tmp_path: Path, shape: GridShape, is_sharded: bool) -> None:
    ranks = build_ranks(shape, small_spec(tied=True, vocab=29, padded=32), is_sharded=is_sharded)
    for rank in ranks:
        rank.set_values(3)

    def save_in_background(rank: Rank) -> Path:
        writer = BackgroundWriter(rank.optimizer, rank.grid, rank.optimizer.kinds)
        try:
            writer.begin(a_save(tmp_path / "one", rank, 10))
            return writer.commit()
        finally:
            writer.close()

    (path,) = set(run_ranks(ranks, save_in_background))
    run_ranks(ranks, lambda rank: save(tmp_path / "other", rank, 10))
    for kind in ranks[0].optimizer.kinds:
        assert hash_tensors(path, kind) == hash_tensors(tmp_path / "other" / path.name, kind)


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        (FULL, r"shard_00000\.safetensors: No space left on device \(errno 28\)"),
        (FORBIDDEN, r"/forbidden: Permission denied \(errno 13\)"),
        (DYING, "the process that writes the checkpoint ended .killed by SIGKILL"),
        (BROKEN, "the process that writes the checkpoint ended .exit code 1"),
        (LYING, r"--verify-saves"),
    ],
)
def test_a_writer_that_fails_leaves_older_checkpoints(
    tmp_path: Path, make_writer: Callable[..., BackgroundWriter], program: str, problem: str
) -> None:
    rank = one_rank(seed=3)
    save(tmp_path, rank, 10)
    writer = make_writer(rank, program, verifies=True)
    for _ in range(2):
        writer.begin(a_save(tmp_path, rank, 20))
        with pytest.raises(CheckpointError, match=f"saving iteration 20 to .*{problem}"):
            writer.commit()
        assert not list(tmp_path.glob("*.tmp-*"))
    assert load(tmp_path, rank).iteration == 10


def test_a_writer_that_died_is_replaced_by_the_next_save(
    tmp_path: Path, make_writer: Callable[..., BackgroundWriter]
) -> None:
    rank, died = one_rank(seed=3), tmp_path / "died"
    fault = (
        f"os.path.exists({str(died)!r}) or (os.mkdir({str(died)!r}), os.kill(os.getpid(), signal.SIGKILL))"
    )
    writer = make_writer(rank, FAULTY.format(fault=fault))
    writer.begin(a_save(tmp_path, rank, 10))
    with pytest.raises(CheckpointError, match="the next save starts a new process"):
        writer.commit()
    writer.begin(a_save(tmp_path, rank, 20))
    assert verify(writer.commit()) == []


def test_a_link_in_place_of_the_temporary_folder_is_no_checkpoint(
    tmp_path: Path, make_writer: Callable[..., BackgroundWriter]
) -> None:
    rank = one_rank()
    older = save(tmp_path / "run", rank, 10)
    writer, pending = make_writer(rank), a_save(tmp_path / "run", rank, 20)
    writer.begin(pending)
    while not writer.is_ready:
        time.sleep(0.01)
    pending.temporary.rename(tmp_path / "elsewhere")
    pending.temporary.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="a link took the place of the folder"):
        writer.commit()
    assert [path.name for path in (tmp_path / "run").glob("iter_*")] == [older.name]


def assert_fails_on_two_ranks(folder: Path, build: Callable[[Rank], BackgroundWriter], message: str) -> None:
    """Save in the background on two ranks; check the error of all ranks, and that no file is left."""
    ranks = build_ranks(GridShape(tp=2), small_spec(tied=True, vocab=29, padded=32))

    def save_in_background(rank: Rank) -> Path:
        writer = build(rank)
        try:
            writer.begin(a_save(folder, rank, 10))
            return writer.commit()
        finally:
            writer.close()

    for rank in ranks:
        rank.set_values(3)
    answers = run_ranks(ranks, save_in_background)
    assert all(isinstance(answer, CheckpointError) for answer in answers)
    assert re.search(message, str(answers[0]))
    assert list(folder.iterdir()) == []


def test_what_fails_in_one_writer_fails_on_all_ranks(tmp_path: Path) -> None:
    def build(rank: Rank) -> BackgroundWriter:
        options = {"program": FULL} if rank.grid.rank == 1 else {}
        return BackgroundWriter(rank.optimizer, rank.grid, rank.optimizer.kinds, **options)

    assert_fails_on_two_ranks(tmp_path, build, r"rank 1: .*shard_00001\.safetensors: No space left")


def test_a_writer_that_cannot_be_started_again_stops_the_save_on_all_ranks(tmp_path: Path) -> None:
    def build(rank: Rank) -> BackgroundWriter:
        writer = BackgroundWriter(rank.optimizer, rank.grid, rank.optimizer.kinds)
        if rank.grid.rank == 1:
            os.kill(writer._writer.pid, signal.SIGKILL)
            writer._writer._program.process.wait()
            writer._start_writer = lambda: os.open(tmp_path / "none", os.O_RDONLY)
        return writer

    assert_fails_on_two_ranks(tmp_path, build, r"rank 1: .*none: No such file or directory \(errno 2\)")


@pytest.mark.nightly
def test_a_slow_writer_is_not_ready(tmp_path: Path, make_writer: Callable[..., BackgroundWriter]) -> None:
    rank = one_rank(seed=3)
    writer = make_writer(rank, SLOW)
    assert writer.is_ready
    writer.begin(a_save(tmp_path, rank, 10))
    assert not writer.is_ready
    deadline = time.monotonic() + 60
    while not writer.is_ready:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert verify(writer.commit()) == []


def test_too_little_host_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "available_bytes", lambda: 1000)
    rank = one_rank()
    with pytest.raises(CheckpointError, match=r"GB of host memory on .*\n.*remove --async-save"):
        BackgroundWriter(rank.optimizer, rank.grid, rank.optimizer.kinds)


def test_the_writer_dies_with_its_rank_and_ignores_the_signals_of_schedulers(tmp_path: Path) -> None:
    program = f"""
import sys, time
sys.path.insert(0, {str(Path(megatrain.__file__).parents[1])!r})
from megatrain.checkpoint.writer_process import SharedMemory, WriterProcess
writer = WriterProcess(SharedMemory(1 << 20), cpu_priority=10, io_priority=3)
writer.begin([], verifies=False)
writer.result()
print(writer.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        pid = int(rank.stdout.readline())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(pid, number)
        time.sleep(0.2)
        stat = Path(f"/proc/{pid}/stat").read_text().split()
        assert stat[2] == "S"
        assert int(stat[18]) == 10
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
        rank.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_file_that_the_disk_changes_is_found_when_it_is_read_again(tmp_path: Path) -> None:
    class LyingDisk(Disk):
        def sync(self, file: Any) -> None:
            os.pwrite(file.fileno(), b"?", 5000)
            super().sync(file)

    with pytest.raises(CheckpointError, match=r"differs from what was written .*--verify-saves"):
        save(tmp_path, one_rank(), 10, disk=LyingDisk(), verifies=True)
    assert list(tmp_path.iterdir()) == []
