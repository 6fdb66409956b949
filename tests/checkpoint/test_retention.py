"""Older checkpoints are removed after a newer one is verified; the newest two, retained ones and those being read stay."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import RecordingDisk, load, one_rank, save

from megatrain.checkpoint.find import base_folder, find_checkpoints, list_candidates, newest_valid
from megatrain.checkpoint.load import NoCheckpointError
from megatrain.checkpoint.reader import CheckpointReader
from megatrain.checkpoint.retention import Retention, remove_older
from megatrain.storage.disk import Disk

torch.set_num_threads(1)


def iterations(folder: Path) -> list[int]:
    return sorted(candidate.iteration for candidate in find_checkpoints(folder) if not candidate.problem)


def save_many(folder: Path, numbers: range, rule: Retention) -> list[str]:
    rank, lines = one_rank(), []
    for number in numbers:
        save(folder, rank, number)
        lines += remove_older(folder, number, rule, Disk())
    return lines


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (Retention(), [10, 20, 30, 40, 50, 60, 70]),
        (Retention(keep_last=2), [60, 70]),
        (Retention(keep_last=3), [50, 60, 70]),
        (Retention(retain_interval=30), [30, 60, 70]),
        (Retention(retain_interval=20), [20, 40, 60, 70]),
        (Retention(retain_interval=50), [50, 60, 70]),
        (Retention(retain_interval=30, keep_last=2), [30, 60, 70]),
    ],
)
def test_the_newest_two_and_the_retained_ones_stay(tmp_path: Path, rule: Retention, kept: list[int]) -> None:
    lines = save_many(tmp_path, range(10, 80, 10), rule)
    assert iterations(tmp_path) == kept
    assert len(lines) == 7 - len(kept)
    assert not list(tmp_path.glob("*.tmp-*"))


def test_an_interval_removes_only_the_third_newest_at_each_save(tmp_path: Path) -> None:
    save_many(tmp_path, range(10, 60, 10), Retention())
    save_many(tmp_path, range(60, 90, 10), Retention(retain_interval=100))
    assert iterations(tmp_path) == [10, 20, 30, 70, 80]


def test_damaged_checkpoints_do_not_count(tmp_path: Path) -> None:
    save_many(tmp_path, range(10, 40, 10), Retention())
    (tmp_path / "iter_0000030" / "shard_00000.safetensors").unlink()
    save_many(tmp_path, range(40, 50, 10), Retention(keep_last=2))
    assert iterations(tmp_path) == [20, 40]


def flip_a_bit(checkpoint: Path) -> None:
    shard = next(checkpoint.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def test_the_newest_one_whose_data_are_known_to_be_intact_stays(tmp_path: Path) -> None:
    save_many(tmp_path, range(10, 40, 10), Retention())
    flip_a_bit(tmp_path / "iter_0000030")  # the run has loaded 20
    intact = {(tmp_path / "iter_0000020").resolve()}
    save(tmp_path, one_rank(), 40)
    lines = remove_older(tmp_path, 40, Retention(keep_last=2), Disk(), intact=intact)
    assert lines == [f"removed {tmp_path}/iter_0000010"]
    flip_a_bit(tmp_path / "iter_0000040")
    assert load(tmp_path, one_rank()).iteration == 20


def test_nothing_is_removed_if_the_new_checkpoint_is_not_valid(tmp_path: Path) -> None:
    save_many(tmp_path, range(10, 40, 10), Retention())
    (tmp_path / "iter_0000030" / "manifest.json").write_text("{}")
    (line,) = remove_older(tmp_path, 30, Retention(keep_last=2), Disk())
    assert "manifest.json" in line
    assert iterations(tmp_path) == [10, 20]


def test_a_checkpoint_that_is_read_or_linked_stays(tmp_path: Path) -> None:
    save_many(tmp_path, range(10, 50, 10), Retention())
    (tmp_path / "iter_0000020").rename(tmp_path / "elsewhere")
    (tmp_path / "iter_0000020").symlink_to(tmp_path / "elsewhere")
    with CheckpointReader(tmp_path / "iter_0000010"):
        lines = remove_older(tmp_path, 40, Retention(keep_last=2), Disk())
    assert lines == [
        f"{tmp_path}/iter_0000020 is a link, and stays",
        f"{tmp_path}/iter_0000010 is being read, and stays",
    ]
    assert remove_older(tmp_path, 40, Retention(keep_last=2), Disk())[1:] == [
        f"removed {tmp_path}/iter_0000010"
    ]


def test_the_old_name_is_gone_for_good_before_files_are_deleted(tmp_path: Path) -> None:
    disk = RecordingDisk()
    save_many(tmp_path, range(10, 40, 10), Retention())
    remove_older(tmp_path, 30, Retention(keep_last=2), disk)
    assert [operation[0] for operation in disk.operations] == ["rename", "sync_folder", "remove"]


class NoRemoval(Disk):
    def rename(self, source: Path, target: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")


def test_a_failure_is_a_line(tmp_path: Path) -> None:
    save_many(tmp_path, range(10, 40, 10), Retention())
    (line,) = remove_older(tmp_path, 30, Retention(keep_last=2), NoRemoval())
    assert "iter_0000010 could not be removed: Read-only" in line
    assert iterations(tmp_path) == [10, 20, 30]


class DiesWhileDeleting(Disk):
    def remove(self, path: Path) -> None:
        (path / "manifest.json").unlink()
        raise OSError(errno.EIO, "Input/output error")


def test_an_interrupted_removal_leaves_no_candidate_and_is_finished_by_the_next_save(tmp_path: Path) -> None:
    save_many(tmp_path, range(10, 40, 10), Retention())
    remove_older(tmp_path, 30, Retention(keep_last=2), DiesWhileDeleting())
    assert [candidate.iteration for candidate in list_candidates(tmp_path)] == [30, 20]
    assert list(tmp_path.glob("iter_0000010.tmp-*"))
    save(tmp_path, one_rank(), 40)
    assert not list(tmp_path.glob("*.tmp-*"))


def test_one_checkpoint_is_chosen_by_its_folder(tmp_path: Path) -> None:
    save_many(tmp_path, range(10, 40, 10), Retention())
    rank, chosen = one_rank(), tmp_path / "iter_0000020"
    assert load(chosen, rank).iteration == 20
    found = newest_valid(chosen)
    assert found is not None
    assert found.iteration == 20
    assert base_folder(chosen) == base_folder(tmp_path) == tmp_path
    (chosen / "shard_00000.safetensors").unlink()
    with pytest.raises(NoCheckpointError, match=r"iteration 20: .*shard_00000"):
        load(chosen, rank)
    with pytest.raises(NoCheckpointError):
        load(tmp_path / "iter_0000025", rank)


def test_the_newest_of_several_folders_is_loaded(tmp_path: Path) -> None:
    rank = one_rank()
    for name, number in (("slow", 10), ("fast", 15), ("slow", 20), ("fast", 25)):
        save(tmp_path / name, rank, number)
    folders = {"folder": tmp_path / "slow", "also": (tmp_path / "fast",)}
    assert load(rank=rank, **folders).path == tmp_path / "fast" / "iter_0000025"
    (tmp_path / "fast" / "iter_0000025" / "manifest.json").unlink()
    loaded = load(rank=rank, **folders)
    assert loaded.path == tmp_path / "slow" / "iter_0000020"
    assert "5 iterations are lost" in loaded.skipped[0]
