"""Manifests in parts: a rank reads what it needs, and a part that is damaged or missing is found as every other file is."""

import json
import secrets
import shutil
import threading
from collections import Counter
from pathlib import Path

import pytest
from checkpoint_helpers import (
    Rank,
    assert_same,
    build_ranks,
    load,
    one_rank,
    run_ranks,
    save,
    save_all,
    small_spec,
)
from hostile_manifests import signed

from megatrain.checkpoint import parts
from megatrain.checkpoint import save as saving
from megatrain.checkpoint.errors import MismatchError
from megatrain.checkpoint.find import find_checkpoints, list_candidates, newest_valid
from megatrain.checkpoint.manifest import read_root
from megatrain.checkpoint.parts import merge_parts, read_manifest, write_part
from megatrain.checkpoint.reader import CheckpointReader, verify
from megatrain.config.errors import NoCheckpointError
from megatrain.optim.sharded import ShardedOptimizer
from megatrain.parallel.rank_lists import GridShape
from megatrain.storage.disk import Disk
from megatrain.storage.untrusted_json import InvalidError
from megatrain.tools.main import main

SHAPE = GridShape(tp=2, dp=2)
SPEC = small_spec(tied=False, vocab=29, padded=32, num_layers=2)
OTHER_SHAPES = [GridShape(), GridShape(pp=2, dp=2)]


@pytest.fixture(autouse=True)
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "MAX_RANKS_OF_WHOLE", 0)
    monkeypatch.setattr(ShardedOptimizer, "sync_model_weights", lambda _: None)  # a collective


@pytest.fixture
def ranks() -> list[Rank]:
    found = build_ranks(SHAPE, SPEC)
    fill_all(found, 1)
    return found


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Parts that are read, by the rank's thread and name."""
    found, read_part = Counter[str](), parts.read_part

    def counted(path: Path, name: str, root: object) -> object:
        found[f"{threading.get_ident()} {name}"] += 1
        return read_part(path, name, root)

    monkeypatch.setattr(parts, "read_part", counted)
    return found


def fill_all(ranks: list[Rank], seed: int) -> None:
    for rank in ranks:
        rank.set_values(seed)


def cleared(ranks: list[Rank]) -> list[Rank]:
    for rank in ranks:
        rank.clear()
    return ranks


def test_ranks_of_the_same_layout_read_their_own_parts(
    tmp_path: Path, ranks: list[Rank], reads: Counter[str]
) -> None:
    """Of 4 parts, a rank reads one of its own, and those of tensors that ranks with copies have written."""
    saved = [rank.values() for rank in ranks]
    (path, *_) = run_ranks(ranks, lambda rank: save(tmp_path, rank, 10))
    root = read_root(path)
    assert len(root.parts) == 4
    assert not root.tensors
    run_ranks(cleared(ranks), lambda rank: load(tmp_path, rank))
    for rank, values in zip(ranks, saved, strict=True):
        assert_same(values, rank.values())
    assert max(reads.values()) == 1, "a rank reads a part twice"
    assert sum(reads.values()) < 4 * 4


@pytest.mark.parametrize("shape", OTHER_SHAPES, ids=str)
def test_another_layout_reads_the_parts_that_overlap(
    tmp_path: Path, ranks: list[Rank], shape: GridShape
) -> None:
    run_ranks(ranks, lambda rank: save(tmp_path, rank, 10))
    fresh = build_ranks(shape, SPEC)
    expected = build_ranks(shape, SPEC)
    fill_all(expected, 1)
    run_ranks(cleared(fresh), lambda rank: load(tmp_path, rank))
    for rank, other in zip(fresh, expected, strict=True):
        assert_same(rank.values(), other.values())


def test_the_whole_is_what_one_manifest_would_have(tmp_path: Path, ranks: list[Rank]) -> None:
    whole = read_manifest(save_all(tmp_path / "whole", ranks, 10))
    (path, *_) = run_ranks(ranks, lambda rank: save(tmp_path / "parts", rank, 10))
    found = read_manifest(path)
    assert found.tensors.keys() == whole.tensors.keys()
    assert found.files == whole.files
    for name, tensor in whole.tensors.items():
        for kind, stored in tensor.kinds.items():
            assert set(found.tensors[name].kinds[kind].chunks) == set(stored.chunks)
    assert verify(path) == []


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with iterations 10 and 20 in parts, of seeds 1 and 2."""
    found, made = tmp_path_factory.mktemp("saved"), build_ranks(SHAPE, SPEC)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "MAX_RANKS_OF_WHOLE", 0)
        for seed in (1, 2):
            fill_all(made, seed)
            run_ranks(made, lambda rank: save(found, rank, 10 * rank.optimizer.step_count))
    return found


@pytest.fixture
def folder(tmp_path: Path, saved_once: Path) -> Path:
    """A copy that a test may harm."""
    return shutil.copytree(saved_once, tmp_path / "copy")


def drop(path: Path) -> None:
    path.unlink()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def link(path: Path) -> None:
    path.rename(path.with_suffix(".away"))
    path.symlink_to(path.with_suffix(".away"))


def swap(path: Path) -> None:
    other = path.with_name("part_00001.json")
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


@pytest.mark.parametrize(
    "harm", [drop, flip, *(pytest.param(one, marks=pytest.mark.nightly) for one in (shorten, link, swap))]
)
def test_a_harmed_part_makes_all_ranks_load_the_older_checkpoint(
    folder: Path, ranks: list[Rank], harm
) -> None:
    harm(folder / "iter_0000020" / "part_00003.json")
    loaded = run_ranks(cleared(ranks), lambda rank: load(folder, rank))
    assert {one.iteration for one in loaded} == {10}
    expected = build_ranks(SHAPE, SPEC)
    fill_all(expected, 1)
    for rank, other in zip(ranks, expected, strict=True):
        assert_same(rank.values(), other.values())
    assert all("part_0000" in reason for one in loaded for reason in one.skipped)
    assert any("part_0000" in problem for problem in verify(folder / "iter_0000020"))


def test_a_missing_shard_is_found_without_its_part(folder: Path, reads: Counter[str]) -> None:
    (folder / "iter_0000020" / "shard_00002.safetensors").unlink()
    problems = {one.iteration: one.problem for one in find_checkpoints(folder)}
    assert problems[10] is None
    assert "shard_00002.safetensors" in (problems[20] or "")
    assert not reads, "a list of checkpoints reads a part"
    newest = newest_valid(folder)
    assert newest is not None
    assert newest.iteration == 10


def test_a_root_with_a_wrong_part_is_refused(folder: Path, ranks: list[Rank]) -> None:
    """Its checksum is right: the part of another rank under this name, a list without it, and files of another part."""
    file = folder / "iter_0000020" / "manifest.json"
    content = json.loads(file.read_text())
    for edit in (
        lambda parts: parts.update({"../part_00009.json": parts["part_00001.json"]}),
        lambda parts: parts.update({"part_00001.json": {**parts["part_00001.json"], "name_keys": "xyz"}}),
        lambda parts: parts.pop("part_00001.json"),
        lambda parts: parts["part_00001.json"]["files"].update({"shard_00002.safetensors": 8}),
        lambda parts: parts.clear(),
    ):
        changed = json.loads(json.dumps(content))
        edit(changed["parts"])
        file.write_bytes(signed(changed))
        loaded = run_ranks(cleared(ranks), lambda rank: load(folder, rank))
        assert {one.iteration for one in loaded} == {10}


def test_a_save_with_a_chunk_too_few_or_too_many_is_not_committed(tmp_path: Path, ranks: list[Rank]) -> None:
    (path, *_) = run_ranks(ranks, lambda rank: save(tmp_path, rank, 10))
    whole, contents = read_manifest(path), {"state": {"has_optimizer": True}, "config": {}, "iteration": 1}
    contents |= {"consumed_train_samples": 8, "optimizer_step_count": 1}
    reports = [
        [
            {
                "name": file,
                "file": vars(stored),
                "chunks": [
                    (name, tensor.shape, kind, of_kind.dtype, chunk.key, chunk.box, chunk.checksums)
                    for name, tensor in whole.tensors.items()
                    for kind, of_kind in tensor.kinds.items()
                    for chunk in of_kind.chunks
                    if chunk.file == file
                ],
            }
        ]
        for file, stored in whole.files.items()
    ]

    def merge(changed: list) -> None:
        target = tmp_path / secrets.token_hex(4)
        target.mkdir()
        merge_parts([write_part(target, rank, one, Disk()) for rank, one in enumerate(changed)], **contents)

    merge(reports)
    chunks = reports[3][0]["chunks"]
    for wrong in (chunks[1:], chunks[:-1], [*chunks, chunks[-1]], [*chunks[1:], reports[2][0]["chunks"][0]]):
        with pytest.raises((AssertionError, InvalidError), match=r"chunks overlap|lacks its first|has \w+"):
            merge([*reports[:3], [reports[3][0] | {"chunks": wrong}]])


def test_an_unused_or_missing_tensor_is_named(folder: Path) -> None:
    with pytest.raises(
        MismatchError, match=r"has the tensor decoder\.layers\.1\.\S+ and \d+ more, which the model lacks"
    ):
        load(folder, one_rank(num_layers=1))
    with pytest.raises(MismatchError, match=r"has no tensor decoder\.layers\.2"):
        load(folder, one_rank(num_layers=3))


def test_without_an_older_one_the_reason_names_the_part(folder: Path) -> None:
    for path in (one.path for one in list_candidates(folder)):
        flip(path / "part_00002.json")
    with pytest.raises(NoCheckpointError, match=r"part_00002\.json: the size or the checksum"):
        load(folder, one_rank(num_layers=2))


def test_the_work_of_rank_0_grows_with_its_lines_alone(
    tmp_path: Path, ranks: list[Rank], reads: Counter[str]
) -> None:
    """It gets a line of each rank, and neither encodes nor decodes what the line describes."""
    (path, *_) = run_ranks(ranks, lambda rank: save(tmp_path, rank, 10))
    run_ranks(ranks, lambda rank: save(tmp_path, rank, 20))
    assert not reads, "a save reads parts"
    root, whole = (
        (path / "manifest.json").stat().st_size,
        sum(one.num_bytes for one in read_root(path).parts.values()),
    )
    assert root - 2000 < whole / 4
    with CheckpointReader(path, rank=3) as opened:
        assert len(opened.manifest.files) == 1
        assert opened._parts is not None


def test_the_tools_know_parts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "ls", str(folder)]) == 0
    assert "are on this node" not in capsys.readouterr().out
    (folder / "iter_0000010" / "part_00001.json").unlink()
    assert main(["checkpoint", "verify", str(folder)]) == 3
    assert "part_00001.json" in capsys.readouterr().out
