"""A damaged checkpoint is never loaded: an older one is, or the load fails."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import (
    build_ranks,
    load,
    one_rank,
    run_ranks,
    save,
    save_all,
    small_spec,
    write_tensors,
)
from everyday import one_in
from hostile_manifests import rename_file, signed

from megatrain.checkpoint.errors import DamagedError, MismatchError
from megatrain.checkpoint.find import find_checkpoints, newest_valid
from megatrain.checkpoint.manifest import StoredFile
from megatrain.checkpoint.reader import verify
from megatrain.checkpoint.tensor_file import TensorFile
from megatrain.config.errors import NoCheckpointError
from megatrain.parallel.rank_lists import GridShape

torch.set_num_threads(1)

TRACKER = "latest_checkpointed_iteration.txt"
NEW = "iter_0000020"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Iteration 10 with seed 1, iteration 20 with seed 2, each in three shards."""
    ranks = build_ranks(GridShape(dp=3), small_spec(tied=False, vocab=29, padded=32, num_layers=1))
    for seed in (1, 2):
        for rank in ranks:
            rank.set_values(seed)
        save_all(tmp_path, ranks, 10 * seed)
    return tmp_path


def assert_falls_back(folder: Path, reason: str = "") -> None:
    rank = one_rank(seed=9)
    loaded = load(folder, rank)
    assert loaded.iteration == 10
    assert all(torch.equal(a, b) for a, b in zip(rank.values(), one_rank(seed=1).values(), strict=True))
    (skipped,) = loaded.skipped
    assert skipped.startswith("skipped iteration 20: ")
    assert skipped.endswith("; 10 iterations are lost")
    assert reason in skipped


@pytest.mark.parametrize("num_flips", one_in(2, [60, 600]))
def test_bit_flips_never_load_wrong(folder: Path, num_flips: int) -> None:
    random_numbers = random.Random(5)
    files = sorted((folder / NEW).iterdir())
    expected = {1: one_rank(seed=1).values(), 2: one_rank(seed=2).values()}
    rank = one_rank()
    num_harmless = 0
    for number in range(num_flips):
        file = files[number % len(files)]
        good = file.read_bytes()
        place = random_numbers.randrange(len(good) if number % 8 else 4000)
        flipped = bytearray(good)
        flipped[place] ^= 1 << random_numbers.randrange(8)
        file.write_bytes(flipped)
        loaded = load(folder, rank)
        values = expected[loaded.iteration // 10]
        assert all(torch.equal(a, b) for a, b in zip(rank.values(), values, strict=True)), (file, place)
        num_harmless += loaded.iteration == 20
        assert loaded.iteration == 20 or file.name in loaded.skipped[0]
        assert verify(folder / NEW), (file, place)
        file.write_bytes(good)
    assert num_harmless == 0
    assert load(folder, rank).iteration == 20


def test_a_header_that_only_looks_the_same_is_damage(tmp_path: Path) -> None:
    """A line break in place of a padding space is JSON too."""
    for length in range(8):
        path = tmp_path / f"{length}.safetensors"
        written = write_tensors(path, [("k" * (length + 1), torch.ones(4))])
        stored = StoredFile(written.num_bytes, written.header_crc32)
        changed = path.read_bytes().replace(b"} ", b"}\n")
        is_padded = changed != path.read_bytes()
        path.write_bytes(changed)
        if is_padded:
            with pytest.raises(DamagedError, match="the header does not match its checksum"):
                TensorFile(path, stored)
        else:
            TensorFile(path, stored).close()


@pytest.mark.parametrize("name", ["manifest.json", "shard_00001.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_truncation_falls_back(folder: Path, name: str, share: float) -> None:
    file = folder / NEW / name
    os.truncate(file, int(file.stat().st_size * share))
    assert_falls_back(folder, name)
    assert verify(folder / NEW)
    found = newest_valid(folder)
    assert found is not None
    assert found.iteration == 10


def zero_page(new: Path) -> None:
    file = new / "shard_00002.safetensors"
    with file.open("r+b") as handle:
        handle.seek(file.stat().st_size - 4096)
        handle.write(bytes(4096))


def swap_shards(new: Path) -> None:
    one, other = new / "shard_00000.safetensors", new / "shard_00001.safetensors"
    one.rename(new / "x")
    other.rename(one)
    (new / "x").rename(other)


def stale_shard(new: Path) -> None:
    shutil.copy(new.with_name("iter_0000010") / "shard_00001.safetensors", new)


def stale_manifest(new: Path) -> None:
    shutil.copy(new.with_name("iter_0000010") / "manifest.json", new)


def link_shard(new: Path) -> None:
    (new / "shard_00001.safetensors").rename(new.parent / "elsewhere")
    (new / "shard_00001.safetensors").symlink_to(new.parent / "elsewhere")


def pipe_shard(new: Path) -> None:
    (new / "shard_00001.safetensors").unlink()
    os.mkfifo(new / "shard_00001.safetensors")


def link_manifest(new: Path) -> None:
    (new / "manifest.json").rename(new / "elsewhere")
    (new / "manifest.json").symlink_to(new / "elsewhere")


def pipe_manifest(new: Path) -> None:
    (new / "manifest.json").unlink()
    os.mkfifo(new / "manifest.json")


def link_folder(new: Path) -> None:
    new.rename(new.with_name("elsewhere"))
    new.symlink_to(new.with_name("elsewhere"))


def rename_folder(new: Path) -> None:
    shutil.rmtree(new)
    shutil.copytree(new.with_name("iter_0000010"), new)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (zero_page, "does not match its checksum"),
        (swap_shards, "shard_00000.safetensors"),
        (stale_shard, "shard_00001.safetensors: "),
        (stale_manifest, "manifest is of iteration 10"),
        (rename_folder, "manifest is of iteration 10"),
        (lambda new: (new / "shard_00001.safetensors").unlink(), "No such file"),
        (lambda new: (new / "manifest.json").unlink(), "manifest.json: No such file"),
        (link_shard, "shard_00001.safetensors"),
        (pipe_shard, "shard_00001.safetensors"),
        (link_manifest, "manifest.json: "),
        (pipe_manifest, "manifest.json: not a regular file"),
        (link_folder, "a link, not a folder"),
        (lambda new: (new / "manifest.json").write_text("[" * 100_000), "manifest.json: "),
        (lambda new: (new / "manifest.json").write_text("9" * 100_000), "manifest.json: "),
        (lambda new: (new / "manifest.json").write_text("{}"), "manifest.json: "),
        (lambda new: os.truncate(new / "manifest.json", 1 << 40), "more than the"),
        (lambda new: (shutil.rmtree(new), new.write_text("")), NEW),
    ],
)
def test_damage_falls_back(folder: Path, damage: Callable[[Path], Any], reason: str) -> None:
    damage(folder / NEW)
    assert_falls_back(folder, reason)


def test_a_folder_of_another_user_falls_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = Path.stat

    def forbidden(path: Path, **options: Any) -> os.stat_result:
        if path.parent == folder / NEW:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", forbidden)
    assert_falls_back(folder, "Permission denied")


def edited(new: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """A changed manifest with a valid checksum, as a program could write it."""
    file = new / "manifest.json"
    content = json.loads(file.read_text())
    edit(content)
    file.write_bytes(signed(content))


def first_tensor(content: dict[str, Any]) -> dict[str, Any]:
    return next(iter(content["tensors"].values()))


def first_stored(content: dict[str, Any]) -> dict[str, Any]:
    return first_tensor(content)["kinds"]["weight"]


def first_chunk(content: dict[str, Any]) -> dict[str, Any]:
    return first_stored(content)["chunks"][0]


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (rename_file("../iter_0000010/shard_00000.safetensors"), "is not a valid file name"),
        (rename_file("/etc/passwd.safetensors"), "is not a valid file name"),
        (rename_file("..safetensors"), "is not a valid file name"),
        (rename_file("a/b.safetensors"), "is not a valid file name"),
        (rename_file("a\x00.safetensors"), "is not a valid file name"),
        (rename_file("manifest.json"), "is not a valid file name"),
        (lambda c: c["files"].popitem(), "is not among the files"),
        (lambda c: c.update(iteration=True), "iteration True is not an integer"),
        (lambda c: c.update(iteration=-1), "iteration -1 is not an integer"),
        (lambda c: c.update(tensors=[]), "tensors is not a JSON object"),
        (lambda c: c.update(state=None), "state is not a JSON object"),
        (lambda c: first_tensor(c).update(shape=[1 << 40, 1 << 40]), "shape"),
        (lambda c: first_tensor(c).update(shape=[]), "shape"),
        (lambda c: first_tensor(c).update(shape=[1] * 9), "shape"),
        (lambda c: first_tensor(c).update(shape=[29, 16.0]), "is not an integer"),
        (lambda c: first_stored(c).update(dtype="I8"), "dtype I8"),
        (lambda c: first_stored(c).update(dtype="F64"), "is not F64"),
        (lambda c: first_stored(c)["chunks"].append(first_chunk(c)), "chunks have"),
        (lambda c: first_chunk(c).update(box=[[0, 1 << 62], [0, 16]]), "box"),
        (lambda c: first_chunk(c).update(box=[[-1, 3], [0, 16]]), "box"),
        (lambda c: first_chunk(c).update(box=[[0]]), "box"),
        (lambda c: first_chunk(c).update(key="nothing"), "has no nothing"),
        (lambda c: first_chunk(c).update(checksums="00000000"), "does not match its checksum"),
        (lambda c: first_chunk(c).update(checksums=""), "checksums '' of 1 blocks"),
        (lambda c: first_chunk(c).update(checksums="0" * 16), "of 1 blocks"),
        (lambda c: first_chunk(c).update(checksums="0000000G"), "of 1 blocks"),
        (lambda c: c.update(block_bytes=8), "block_bytes 8 is not an integer of at least 1024"),
        (lambda c: c.update(block_bytes=(1 << 20) + 1), "block_bytes 1048577"),
        (lambda c: c.update(block_bytes=1 << 62), "block_bytes"),
    ],
)
def test_wrong_manifests_fall_back(folder: Path, edit: Callable[[dict[str, Any]], Any], reason: str) -> None:
    edited(folder / NEW, edit)
    assert_falls_back(folder, reason)


def test_an_edit_without_the_checksum_falls_back(folder: Path) -> None:
    file = folder / NEW / "manifest.json"
    file.write_text(file.read_text().replace('"consumed_train_samples":160', '"consumed_train_samples":161'))
    assert_falls_back(folder, "the checksum does not match the content")


def test_a_newer_format_is_reported_and_not_skipped(folder: Path) -> None:
    edited(folder / NEW, lambda content: content.update(version=5))
    with pytest.raises(MismatchError, match="version 5; this program reads 'megatrain', up to version 4"):
        load(folder, one_rank())


def test_a_missing_kind_is_named(folder: Path) -> None:
    edited(folder / NEW, lambda content: first_tensor(content)["kinds"].pop("exp_avg"))
    with pytest.raises(MismatchError, match="has no exp_avg of decoder"):
        load(folder, one_rank())
    assert load(folder, one_rank(), with_optimizer=False).iteration == 20


def test_an_extra_file_is_reported_and_left_alone(folder: Path) -> None:
    shutil.copy(folder / NEW / "shard_00000.safetensors", folder / NEW / "shard_00007.safetensors")
    assert load(folder, one_rank()).iteration == 20
    (problem,) = verify(folder / NEW)
    assert "shard_00007.safetensors: not part of this checkpoint" in problem


def test_damage_that_one_rank_sees_turns_all_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = build_ranks(GridShape(tp=2, pp=2), small_spec(tied=False, vocab=29, padded=32))
    for seed in (1, 2):
        for rank in ranks:
            rank.set_values(seed)
        save_all(tmp_path, ranks, 10 * seed)
    zero_page(tmp_path / NEW)
    answers = run_ranks(ranks, lambda rank: load(tmp_path, rank))
    assert [loaded.iteration for loaded in answers] == [10] * 4
    assert "rank 2: " in answers[0].skipped[0]
    assert "shard_00002.safetensors" in answers[0].skipped[0]
    for rank in ranks:
        found = rank.values()
        rank.set_values(1)
        assert all(torch.equal(a, b) for a, b in zip(found, rank.values(), strict=True))


def test_with_none_whole_each_is_named(folder: Path) -> None:
    for name, file in (("iter_0000010", "manifest.json"), (NEW, "shard_00001.safetensors")):
        (folder / name / file).unlink()
    with pytest.raises(
        NoCheckpointError, match=r"(?s)iteration 20: .*shard_00001.*iteration 10: .*manifest"
    ) as caught:
        load(folder, one_rank())
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("place", ["", "nowhere"])
def test_with_none_at_all_the_folder_is_named(tmp_path: Path, place: str) -> None:
    with pytest.raises(NoCheckpointError, match=r"no valid checkpoint \(the folder has no checkpoints"):
        load(tmp_path / place, one_rank())


@pytest.mark.parametrize(
    "text", [b"", b"release", b"\xff\xfe\x00", b"-5", b"1e3", b"../../x", b"9" * 5000, b"10", b"\xc2\xb2"]
)
def test_the_tracker_is_only_a_hint(folder: Path, text: bytes) -> None:
    (folder / TRACKER).write_bytes(text)
    loaded = load(folder, one_rank())
    assert (loaded.iteration, loaded.skipped) == (20, ())


def test_a_missing_iteration_that_the_tracker_names_is_reported(folder: Path) -> None:
    (folder / TRACKER).write_text("30\n")
    loaded = load(folder, one_rank())
    assert loaded.iteration == 20
    assert "skipped iteration 30" in loaded.skipped[0]
    assert "missing; 10 iterations are lost" in loaded.skipped[0]
    assert [candidate.problem is None for candidate in find_checkpoints(folder)] == [False, True, True]


def test_other_names_are_no_candidates(folder: Path) -> None:
    for name in (
        "iter_30",
        "iter_0000030.tmp-1",
        "iter_0000030x",
        "iter_00000030",
        "notes",
        "iter_00000\u0663\u0660",
    ):
        (folder / name).mkdir()
    assert [candidate.iteration for candidate in find_checkpoints(folder)] == [20, 10]


def test_a_checkpoint_can_be_saved_over_a_damaged_one(folder: Path) -> None:
    zero_page(folder / NEW)
    rank = one_rank(seed=3)
    save(folder, rank, 20)
    assert verify(folder / NEW) == []
    assert load(folder, rank).iteration == 20
