"""Local checkpoints of nodes that have a disk each: two ranks are a node, which has a working folder of its own."""

import contextlib
import errno
import io
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from canonical_weights import hash_tensors
from everyday import one_in
from metrics_files import logged_steps
from run_here import MODEL, folder_flags, trainer_of_command_line
from torch.distributed.distributed_c10d import _get_default_store

from megatrain.checkpoint.find import NODE_FILES_NAME, TRACKER_NAME, find_checkpoints
from megatrain.checkpoint.local.nodes import copy_groups
from megatrain.checkpoint.local.transfer import Transfer, send
from megatrain.checkpoint.manifest import MANIFEST_NAME
from megatrain.checkpoint.reader import verify
from megatrain.config.errors import MegatrainError, describe
from megatrain.parallel.grid import RankGroup
from megatrain.storage.disk import Disk
from megatrain.tools.worker_pool import WorkerPool
from megatrain.training.launch import local_checkpoints

LOCAL = (
    "--num-layers 2 --micro-batch-size 1 --global-batch-size 4 --non-persistent-save-interval 3 --non-persistent-ckpt-type local"
    " --non-persistent-local-ckpt-dir ./local/ --save-interval 10"
).split()
COPIES = ["--replication", "--replication-jump", "2"]
LAYOUT = ["--tensor-model-parallel-size", "2"]


def on_nodes(rank: int, world_size: int, folder: Path, flags: list[str]) -> tuple[int, str]:
    """Train on two nodes; return the exit code and what was printed, or the error of a start that fails."""
    per_node = world_size // 2
    node = folder / f"node_{rank // per_node}"
    node.mkdir(exist_ok=True)
    printed, before = io.StringIO(), Path.cwd()
    os.chdir(node)
    try:
        with contextlib.redirect_stdout(printed):
            trainer = trainer_of_command_line(
                rank, world_size, [*MODEL, *flags], _get_default_store(), per_node
            )
            trainer.resume()
            code = trainer.train()
    except MegatrainError as error:
        return error.exit_code, describe(error)
    finally:
        os.chdir(before)
    return code, printed.getvalue()


Run = Callable[..., str]


@pytest.fixture
def run(pool: WorkerPool, tmp_path: Path) -> Run:
    """Return a function that trains on four ranks, resuming if it can, and returns what was printed."""

    def train(*flags: str, code: int = 0, world_size: int = 4) -> str:
        words = [*folder_flags(tmp_path / "run"), *LOCAL, *flags]
        answers = pool.run(world_size, on_nodes, tmp_path, words)
        assert {found for found, _ in answers} == {code}
        return str(answers[0][1])

    (tmp_path / "run").mkdir()
    return train


def forget(save: Path, iteration: int) -> None:
    """Remove the only checkpoint of a run that is not local."""
    shutil.rmtree(save / f"iter_{iteration:07d}")
    (save / TRACKER_NAME).unlink()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("shard*"))


def metrics(folder: Path) -> list[tuple[float, float]]:
    return [(line["lm_loss"], line["grad_norm"]) for line in logged_steps(folder)]


def unbroken(pool: WorkerPool, folder: Path, *flags: str) -> Path:
    """Return the --save folder of the same run without a stop."""
    (folder / "other").mkdir()
    words = [
        *folder_flags(folder / "other"),
        *LOCAL,
        *flags,
        "--non-persistent-local-ckpt-dir",
        "local_of_other",
    ]
    assert {code for code, _ in pool.run(4, on_nodes, folder, words)} == {0}
    return folder / "other"


@pytest.mark.parametrize("copies", one_in(3, [COPIES, [*COPIES, "--async-save"], []]))
def test_a_run_resumes_from_the_disks_of_its_nodes(
    run: Run, pool: WorkerPool, tmp_path: Path, copies: list[str]
) -> None:
    short = [*LAYOUT, *copies, "--train-iters", "8"]
    run(*short, "--exit-interval", "7", code=75)
    forget(tmp_path / "run", 7)
    nodes = [tmp_path / f"node_{node}" / "local" for node in range(2)]
    for node, folder in enumerate(nodes):
        (found,) = find_checkpoints(folder)
        assert (found.iteration, found.problem, verify(found.path)) == (6, None, [])
        own = [f"shard_0000{rank}.safetensors" for rank in (2 * node, 2 * node + 1)]
        every = [f"shard_0000{rank}.safetensors" for rank in range(4)]
        assert files(found.path) == (every if copies else own)
    if copies:
        shutil.rmtree(nodes[len(copies) % 2])  # once the node of rank 0, once the other
    printed = run(*short)
    assert "local/iter_0000006: iteration 6" in printed
    other = unbroken(pool, tmp_path, *LAYOUT, "--train-iters", "8")
    assert metrics(tmp_path / "run") == metrics(other)
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        last = [hash_tensors(folder / "iter_0000008", kind) for folder in (tmp_path / "run", other)]
        assert last[0] == last[1]


@pytest.mark.nightly
@pytest.mark.parametrize("lost", [1, 0])
def test_without_copies_a_lost_disk_costs_the_local_checkpoint(run: Run, tmp_path: Path, lost: int) -> None:
    run("--exit-interval", "16", code=75)
    shutil.rmtree(tmp_path / "run" / "iter_0000016")
    shutil.rmtree(tmp_path / f"node_{lost}")
    printed = run()
    assert "skipped iteration 15: " in printed
    assert (
        f"shard_0000{2 * lost}.safetensors: no node has the file, nor a copy of it; 5 iterations are lost"
        in printed
    )
    assert "run/iter_0000010: iteration 10" in printed


@pytest.mark.nightly
def test_a_checkpoint_that_one_node_has_not_committed_does_not_count(run: Run, tmp_path: Path) -> None:
    """As after a kill between the renames of two nodes: the one before is still there on both."""
    run("--exit-interval", "13", code=75)
    shutil.rmtree(tmp_path / "run" / "iter_0000013")
    node = tmp_path / "node_1" / "local"
    before = tmp_path / "before"
    shutil.copytree(tmp_path / "node_0" / "local" / "iter_0000012", before)
    shutil.copytree(node / "iter_0000012", tmp_path / "before_1")
    run("--exit-interval", "16", code=75)
    shutil.rmtree(tmp_path / "run" / "iter_0000016")
    shutil.copytree(before, tmp_path / "node_0" / "local" / "iter_0000012")
    shutil.copytree(tmp_path / "before_1", node / "iter_0000012")
    (node / "iter_0000015").rename(node / "iter_0000015.tmp-0")
    printed = run()
    assert "skipped iteration 15: " in printed
    assert "local/iter_0000012: iteration 12" in printed
    assert [path.name for path in node.glob("iter*")] == ["iter_0000018"]


@pytest.mark.parametrize(
    ("node", "file"), one_in(4, itertools.product([0, 1], [MANIFEST_NAME, NODE_FILES_NAME]))
)
@pytest.mark.parametrize("content", one_in(3, [b"", b"{\xe4}", None]))
def test_a_damaged_description_costs_nothing(
    run: Run, tmp_path: Path, node: int, file: str, content: bytes | None
) -> None:
    """Another node has the manifest, and the files of the node are known by it; there are no copies."""
    run("--exit-interval", "4", code=75)
    forget(tmp_path / "run", 4)
    damaged = tmp_path / f"node_{node}" / "local" / "iter_0000003" / file
    damaged.write_bytes(damaged.read_bytes()[:-3] if content is None else content)
    assert "local/iter_0000003: iteration 3" in run("--skip-train")


@pytest.mark.nightly
def test_a_disk_that_fails_costs_the_local_checkpoint(run: Run, tmp_path: Path) -> None:
    run("--exit-interval", "16", code=75)
    shutil.rmtree(tmp_path / "run" / "iter_0000016")
    shutil.rmtree(tmp_path / "node_1" / "local")
    (tmp_path / "node_1" / "local").write_text("no folder")
    assert "run/iter_0000010: iteration 10" in run("--skip-train")


def damage(shard: Path, how: str) -> None:
    """Truncate a file, or flip one bit of its tensors."""
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content if how == "flipped" else content[:-1])


def assert_whole(checkpoint: Path) -> None:
    """Assert that the node has all files, on its list too."""
    assert verify(checkpoint) == []
    assert json.loads((checkpoint / NODE_FILES_NAME).read_text()) == files(checkpoint)
    assert len(files(checkpoint)) == 4


@pytest.mark.nightly
def test_a_damaged_copy_that_no_rank_reads_is_replaced_with_one_that_is_read(
    run: Run, tmp_path: Path
) -> None:
    run(*LAYOUT, *COPIES, "--exit-interval", "16", code=75)
    shutil.rmtree(tmp_path / "run" / "iter_0000016")
    checkpoint = tmp_path / "node_1" / "local" / "iter_0000015"
    names = ["shard_00000.safetensors", "shard_00003.safetensors"]
    for name in names:
        damage(checkpoint / name, "flipped")
    printed = run(*LAYOUT, *COPIES, "--exit-interval", "16", code=75)
    assert f"damaged: {', '.join(names)}\n" in printed
    assert_whole(checkpoint)


@pytest.mark.parametrize("how", one_in(2, ["flipped", "truncated"]))
@pytest.mark.parametrize("node", one_in(2, [0, 1]))
def test_a_damaged_file_is_copied_again(run: Run, tmp_path: Path, node: int, how: str) -> None:
    """Before the first checkpoint in --save; if no node has the file intact, the run does not start anew."""
    run(*COPIES, "--exit-interval", "4", code=75)
    forget(tmp_path / "run", 4)
    folder, name = "local/iter_0000003", f"shard_0000{2 * node}.safetensors"
    shards = [tmp_path / f"node_{one}" / folder / name for one in (0, 1)]
    damage(shards[node], how)
    printed = run(*COPIES, "--exit-interval", "4", code=75)
    assert f"{folder}: copied from other nodes" in printed
    assert f": {name}\n" in printed
    assert f"{folder}: iteration 3" in printed
    assert_whole(shards[node].parent)
    forget(tmp_path / "run", 4)
    for shard in shards:
        damage(shard, how)
    assert f"{folder}/{name}: " in run(*COPIES, code=3)


def fill_a_disk(rank: int, world_size: int, folder: Path, flags: list[str]) -> tuple[int, str]:
    """Train on two nodes; the last one has no space for a copy of rank 0's file of iterations 6 and 15."""
    create = Disk.create

    def full(disk: Disk, path: Path) -> Any:
        is_full = path.parent.name.startswith(("iter_0000006", "iter_0000015")) and ".part-" in path.name
        if rank == world_size - 2 and is_full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return create(disk, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Disk, "create", full)
        return on_nodes(rank, world_size, folder, flags)


def test_a_copy_that_cannot_be_written_fails_the_save_on_all_nodes(pool: WorkerPool, tmp_path: Path) -> None:
    words = [
        *folder_flags(tmp_path / "run"),
        *LOCAL,
        *COPIES,
        "--on-save-failure",
        "warn",
        "--exit-interval",
        "7",
    ]
    (tmp_path / "run").mkdir()
    answers = pool.run(4, fill_a_disk, tmp_path, words)
    assert {code for code, _ in answers} == {75}
    assert (
        "WARNING: saving iteration 6 to local/iter_0000006 failed: rank 2: local/iter_0000006"
        in answers[0][1]
    )
    assert "No space left on device (errno 28)" in answers[0][1]
    for node in range(2):
        assert [path.name for path in (tmp_path / f"node_{node}" / "local").glob("iter*")] == ["iter_0000003"]


@pytest.mark.nightly
def test_a_full_disk_costs_the_local_checkpoint(run: Run, pool: WorkerPool, tmp_path: Path) -> None:
    run(*LAYOUT, *COPIES, "--exit-interval", "16", code=75)
    shutil.rmtree(tmp_path / "run" / "iter_0000016")
    shutil.rmtree(tmp_path / "node_1")
    words = [*folder_flags(tmp_path / "run"), *LOCAL, *LAYOUT, *COPIES, "--skip-train"]
    answers = pool.run(4, fill_a_disk, tmp_path, words)
    assert {code for code, _ in answers} == {0}
    assert "skipped iteration 15: " in answers[0][1]
    assert "No space left on device" in answers[0][1]
    assert "run/iter_0000010: iteration 10" in answers[0][1]


def test_a_copy_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    class FullDisk(Disk):
        def write(self, file: Any, data: bytes | memoryview) -> None:
            file.write(data[:1])
            raise OSError(errno.ENOSPC, "No space left on device")

    group = RankGroup("one", (0,), 0)
    transfer = Transfer("a", 3, source=0, targets=(0,))
    (tmp_path / "a").write_bytes(b"abc")
    error = send(tmp_path, transfer, group, torch.device("cpu"), 0, FullDisk())
    assert isinstance(error, OSError)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_that_cannot_be_listed_has_no_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank continues to where all agree; loading reports the error."""

    def fail(folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(folder))

    monkeypatch.setattr(local_checkpoints, "newest_valid", fail)
    assert local_checkpoints._newest(tmp_path) == (None, (-1, ""))


def test_checkpoints_of_another_run_are_refused_on_every_node(
    run: Run, pool: WorkerPool, tmp_path: Path
) -> None:
    run("--exit-interval", "4", code=75)
    shutil.rmtree(tmp_path / "node_0")
    (tmp_path / "other").mkdir()
    answers = pool.run(4, on_nodes, tmp_path, [*folder_flags(tmp_path / "other"), *LOCAL])
    assert {code for code, _ in answers} == {2}
    of_run = f"rank 2: ./local/ has non-persistent checkpoints of the run in --save {tmp_path}/run,"
    assert of_run in answers[0][1]
    assert not (tmp_path / "node_0" / "local").exists()
    assert [path.name for path in (tmp_path / "node_1" / "local").glob("iter*")] == ["iter_0000003"]


def test_the_newest_checkpoint_of_all_ranks_is_found_by_its_iteration() -> None:
    assert local_checkpoints._rank_of_a_newer_one([(-1, ""), (15, "run"), (18, "run")]) == 2
    assert local_checkpoints._rank_of_a_newer_one([(18, "run"), (15, "run"), (18, "run")]) is None


@pytest.mark.nightly
def test_another_layout_reads_the_files_of_all_nodes(run: Run, tmp_path: Path) -> None:
    run(*LAYOUT, "--exit-interval", "16", code=75)
    shutil.rmtree(tmp_path / "run" / "iter_0000016")
    printed = run("--pipeline-model-parallel-size", "2")
    assert "local/iter_0000015: iteration 15" in printed


def test_groups_of_copies_are_those_of_megatron() -> None:
    assert copy_groups(8, factor=2, jump=2) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert copy_groups(6, factor=3, jump=2) == [[0, 2, 4], [1, 3, 5]]
