"""A save that dies or fails at any point leaves what was committed, and nothing that only looks committed."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import (
    DyingDisk,
    FaultyDisk,
    FullDisk,
    Killed,
    Rank,
    RecordingDisk,
    build_ranks,
    load,
    one_rank,
    run_ranks,
    save,
    small_spec,
)
from everyday import only

from megatrain.checkpoint.chunks import PlannedChunk
from megatrain.checkpoint.errors import CheckpointError
from megatrain.checkpoint.find import find_checkpoints
from megatrain.checkpoint.reader import verify
from megatrain.checkpoint.save import copied_ahead, host_buffers
from megatrain.checkpoint.tensor_file import bytes_of
from megatrain.parallel.rank_lists import GridShape
from megatrain.storage.disk import Disk

torch.set_num_threads(1)

TRACKER = "latest_checkpointed_iteration.txt"


RANKS = {seed: one_rank(seed=seed) for seed in (1, 2, 3)}
READER = one_rank(seed=9)


def bits_of(rank: Rank) -> list[bytes]:
    return [values.numpy().tobytes() for values in rank.values()]


EXPECTED = {seed: bits_of(rank) for seed, rank in RANKS.items()}


def loaded_seed(folder: Path) -> int:
    """Load, and return the seed that all loaded values belong to; mixed seeds fail the test."""
    READER.clear()
    load(folder, READER)
    seed = READER.optimizer.step_count  # as `set_values` leaves it
    assert bits_of(READER) == EXPECTED[seed]
    return seed


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """Holds iteration 1 with seed 1."""
    save(tmp_path / "first", RANKS[1], 1)
    return tmp_path / "first"


def num_operations(iteration: int, first: Path) -> int:
    disk = DyingDisk()
    there = first.with_name("count")
    shutil.copytree(first, there)
    save(there, RANKS[2], iteration, disk=disk)
    shutil.rmtree(there)
    return disk.count


def after_fault(first: Path, iteration: int, make_disk: Callable[[int], FaultyDisk], at: int) -> Path:
    """Save `iteration` with seed 2 until the fault; return the folder."""
    there = first.with_name(str(at))
    shutil.copytree(first, there)
    failure: BaseException | None = None
    try:
        save(there, RANKS[2], iteration, disk=make_disk(at))
    except (Killed, CheckpointError) as error:
        failure = error
    if isinstance(failure, CheckpointError):
        assert "No space left on device (errno 28)" in str(failure)
        assert re.search(r"; [\d,]+ bytes needed, [\d,]+ bytes free", str(failure))
        assert str(there) in str(failure)
        assert not list(there.glob("*.tmp-*"))
    return there


@pytest.mark.parametrize("make_disk", [DyingDisk, FullDisk])
@pytest.mark.parametrize("iteration", only({2}, [1, 2]))
def test_every_fault_leaves_a_whole_checkpoint(
    first: Path, iteration: int, make_disk: Callable[[int], FaultyDisk]
) -> None:
    """Iteration 1 replaces the existing checkpoint, iteration 2 is added."""
    total = num_operations(iteration, first)
    assert total > 30
    seen = []
    for at in range(1, total + 1):
        there = after_fault(first, iteration, make_disk, at)
        seen.append(loaded_seed(there))
        for candidate in find_checkpoints(there):
            assert candidate.problem is not None or verify(candidate.path) == []
        shutil.rmtree(there)
    assert seen == sorted(seen), "once the new one is visible it stays"
    assert set(seen) == {1, 2}


def test_the_next_good_save_removes_leftovers(first: Path) -> None:
    for at in range(2, num_operations(1, first), 3):
        there = after_fault(first, 1, DyingDisk, at)
        save(there, RANKS[3], 3)
        assert {path.name for path in there.iterdir()} <= {"iter_0000001", "iter_0000003", TRACKER}
        assert loaded_seed(there) == 3
        shutil.rmtree(there)


def test_a_checkpoint_whose_replacement_was_interrupted_gets_its_name_back(first: Path) -> None:
    (first / "iter_0000001").rename(first / "iter_0000001.old-ab")
    (first / "iter_0000002.old-ab.tmp-cd").mkdir()  # a local checkpoint that was being copied under this name
    assert loaded_seed(first) == 1
    save(first, RANKS[3], 3)
    assert {path.name for path in first.iterdir()} == {"iter_0000001", "iter_0000003", TRACKER}


def test_leftovers_that_cannot_be_removed_do_not_keep_others(first: Path) -> None:
    class OneStays(Disk):
        def remove(self, path: Path) -> None:
            if path.name.endswith("-b"):
                raise PermissionError(13, "Permission denied")
            super().remove(path)

    for name in "abc":
        (first / f"iter_0000002.tmp-{name}").mkdir()
    save(first, RANKS[3], 3, disk=OneStays())
    assert [path.name for path in first.glob("*.tmp-*")] == ["iter_0000002.tmp-b"]


def test_too_little_space_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    class SmallDisk(Disk):
        def free_bytes(self, folder: Path) -> int:
            return 1000

    save(tmp_path, one_rank(), 1)
    with pytest.raises(
        CheckpointError,
        match=rf"{re.escape(str(tmp_path))}: the checkpoint needs [\d,]+ bytes, 1,000 bytes are free",
    ):
        save(tmp_path, one_rank(), 2, disk=SmallDisk())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", TRACKER]


def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file.*errno"):
        save(tmp_path / "file" / "below", one_rank(), 1)


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = build_ranks(GridShape(tp=2, pp=2), small_spec(tied=True, vocab=29, padded=32))
    for rank in ranks:
        rank.set_values(3)
    answers = run_ranks(
        ranks,
        lambda rank: save(tmp_path, rank, 4, disk=FullDisk(5 if rank.grid.rank == 2 else -1)),
    )
    assert all(isinstance(answer, CheckpointError) for answer in answers)
    assert len({str(answer) for answer in answers}) == 1
    assert re.search(
        r"rank 2: .*shard_00002\.safetensors: No space left on device \(errno 28\)", str(answers[0])
    )
    assert list(tmp_path.iterdir()) == []


def test_our_own_mistakes_stop_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save in which two ranks write the same box is not committed."""
    ranks = build_ranks(GridShape(tp=2), small_spec(tied=True, vocab=29, padded=32))
    monkeypatch.setattr("megatrain.parallel.grid.RankGrid.index_in", lambda grid, names: (0, 1))
    answers = run_ranks(ranks, lambda rank: save(tmp_path, rank, 4))
    assert all("chunks have 32 elements, the tensor has 16" in str(answer) for answer in answers)
    assert list(tmp_path.iterdir()) == []


class PowerCut:
    """Builds the files that a disk holds after the first operations of a record.

    Args:
        unsynced: what becomes of file content that was not synchronised: "kept", "lost" or "zeros".
    """

    def __init__(self, unsynced: str) -> None:
        self.unsynced = unsynced

    def rebuild(self, operations: list[tuple[Any, ...]], source: Path, target: Path) -> None:
        synced: dict[Path, bool] = {}
        target.mkdir(parents=True, exist_ok=True)
        for name, *values in operations:
            paths = [target / path.relative_to(source) for path in values if isinstance(path, Path)]
            self._apply(name, paths, values)
            if name == "write":
                synced[paths[0]] = False
            elif name == "sync":
                synced[paths[0]] = True
            elif name == "rename":
                for path in [path for path in synced if path.is_relative_to(paths[0])]:
                    synced[paths[1] / path.relative_to(paths[0])] = synced.pop(path)
        for path, is_safe in synced.items():
            if not is_safe and path.exists() and self.unsynced != "kept":
                size = path.stat().st_size if self.unsynced == "zeros" else 0
                path.write_bytes(bytes(size))

    def _apply(self, name: str, paths: list[Path], values: list[Any]) -> None:
        disk = Disk()
        match name:
            case "make_folder":
                disk.make_folder(paths[0])
            case "create":
                disk.create(paths[0]).close()
            case "write":
                with paths[0].open("ab") as file:
                    file.write(values[1])
            case "rename":
                disk.rename(*paths)
            case "remove":
                disk.remove(paths[0])


@pytest.mark.parametrize("unsynced", ["kept", "lost", "zeros"])
def test_a_power_cut_leaves_the_last_whole_checkpoint(tmp_path: Path, unsynced: str) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    disk = RecordingDisk()
    save(source, RANKS[1], 1, disk=disk)
    begin = len(disk.operations) - 1
    save(source, RANKS[2], 2, disk=disk)
    operations = [op for op in disk.operations if op[1].is_relative_to(source)]
    renamed = next(n for n, op in enumerate(operations) if op[0] == "rename" and op[2].name == "iter_0000002")
    stops = {*range(begin, len(operations), 3), *range(renamed - 3, len(operations) + 1)}
    for stop in sorted(stops):
        PowerCut(unsynced).rebuild(operations[:stop], source, target)
        assert loaded_seed(target) == (2 if stop > renamed else 1)
        shutil.rmtree(target)


def test_the_names_of_new_folders_are_synchronised(tmp_path: Path) -> None:
    disk = RecordingDisk()
    save(tmp_path / "a" / "b", RANKS[1], 1, disk=disk)
    synced = [operation[1] for operation in disk.operations if operation[0] == "sync_folder"]
    assert synced[:2] == [tmp_path / "a", tmp_path]


def test_all_is_synchronised_before_the_rename_and_the_name_after(tmp_path: Path) -> None:
    disk = RecordingDisk()
    path = save(tmp_path, one_rank(), 2, disk=disk)
    names = [
        (op[0], op[1].name.split(".tmp-")[0]) for op in disk.operations if op[0] not in ("create", "write")
    ]
    assert names == [
        ("make_folder", tmp_path.name),
        ("make_folder", path.name),
        ("sync", "shard_00000.safetensors"),
        ("sync", "manifest.json"),
        ("sync_folder", path.name),
        ("rename", path.name),
        ("sync_folder", tmp_path.name),
        ("sync", TRACKER),
        ("rename", TRACKER),
        ("sync_folder", tmp_path.name),
    ]


def test_chunks_are_written_from_two_buffers_in_turn() -> None:
    generator = torch.Generator().manual_seed(0)
    part = [
        PlannedChunk(f"t{n}", (n + 1, 3), "weight", ((0, n + 1), (0, 3)), torch.randn(n + 1, 3, generator=generator).to(dtype))
        for n, dtype in enumerate([torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.bfloat16])
    ]  # fmt: skip
    buffers = [torch.full((96,), 255, dtype=torch.uint8) for _ in range(2)]
    small = [buffer[:8] for buffer in buffers]  # of a GPU's chunks; those of the CPU may be larger
    for given in ([], buffers, small):
        found = [bytes(data) for data in copied_ahead(part, given)]
        assert found == [bytes(bytes_of(chunk.values)) for chunk in part]
    assert host_buffers(part) == []
    (chunk, *_) = part
    on_gpu = dataclasses.replace(chunk, values=chunk.values.to("meta"))
    assert [buffer.numel() for buffer in host_buffers([on_gpu, chunk])] == [chunk.num_bytes] * 2
