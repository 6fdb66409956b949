"""Runs from cached outputs of a teacher: as those with the teacher itself, under every layout, and of the right samples alone."""

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from everyday import only
from metrics_files import logged_steps
from run_here import MODEL, train_here, train_rank, trainer_of_command_line

from megatrain.config import ConfigError, parse
from megatrain.data import teacher_logits
from megatrain.data.teacher_logits import LogitsReader, TopTokens, read_logits_manifest
from megatrain.tools.cache_logits import write_cache
from megatrain.tools.worker_pool import WorkerError, WorkerPool
from megatrain.training.launch.ranks import joined_ranks

STUDENT = [*MODEL, *"--num-layers 2 --hidden-size 16 --train-iters 4 --eval-iters 0 --log-interval 1".split()]
LAYOUTS = {
    "one process": (1, ""),
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "cp2": (2, "--context-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "dp2": (2, ""),
}


def cache(rank: int, world_size: int, words: list[str], folder: str, top_k: int, dtype: str) -> None:
    """Write outputs in shards of one micro-batch."""
    with mock.patch.object(teacher_logits, "_SHARD_BYTES", 1):
        ranks = trainer_of_command_line(rank, world_size, words).ranks
        write_cache(ranks, Path(folder), top_k, dtype)


@pytest.fixture(scope="module")
def teacher(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    flags = f"--train-iters 2 --lr-warmup-iters 0 --eval-iters 0 --save {folder}".split()
    assert pool.run(1, train_here, flags) == [0]
    return folder


@pytest.fixture(scope="module")
def whole(teacher: Path, pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all outputs in fp32, which two tensor ranks of two replicas wrote."""
    folder = tmp_path_factory.mktemp("cache") / "whole"
    words = [*STUDENT, "--export-kd-teacher-load", str(teacher), "--tensor-model-parallel-size", "2"]
    pool.run(4, cache, words, str(folder), 101, "fp32")
    return folder


def losses(path: Path) -> list[float]:
    steps = logged_steps(path)
    return [x for line in steps for x in (line["lm_loss"], line["kd_losses"]["kd loss"], line["grad_norm"])]


@pytest.mark.parametrize("layout", only(("tp2",), LAYOUTS))
def test_all_outputs_teach_what_the_teacher_does(
    teacher: Path, whole: Path, pool: WorkerPool, tmp_path: Path, layout: str
) -> None:
    size, flags = LAYOUTS[layout]
    words = [*STUDENT, *flags.split(), "--metrics-file"]
    source = ["--export-kd-teacher-load", str(teacher), "--no-kd-skip-lm-loss", "--no-kd-balance-losses"]
    assert set(pool.run(1, train_rank, [*STUDENT, "--metrics-file", f"{tmp_path}/a", *source])) == {0}
    cached = ["--logits-load-dir", str(whole), "--logits-load-kd-loss-alpha", "0.5", "--clip-grad", "0"]
    assert set(pool.run(size, train_rank, [*words, f"{tmp_path}/b", *cached])) == {0}
    lm_loss, kd_loss, norm, *_ = losses(tmp_path / "a")
    other = losses(tmp_path / "b")
    # The run with the teacher adds both losses; the other one takes their mean.
    assert other[:3] == pytest.approx([lm_loss, kd_loss, norm / 2], rel=1e-4)
    assert set(pool.run(1, train_rank, [*STUDENT, "--metrics-file", f"{tmp_path}/c", *cached])) == {0}
    assert other == pytest.approx(losses(tmp_path / "c"), rel=1e-4)


def test_a_stopped_command_continues_to_the_same_bytes(
    teacher: Path, pool: WorkerPool, tmp_path: Path
) -> None:
    folder, words = tmp_path / "cache", [*STUDENT, "--export-kd-teacher-load", str(teacher)]
    pool.run(1, cache, words, str(folder), 8, "fp16")
    manifest = read_logits_manifest(folder)
    assert (manifest.num_samples, manifest.num_shards, manifest.top_k) == (32, 16, 8)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    dataclasses.replace(manifest, is_complete=False).write(folder)
    manifest.shard_path(folder, 3).unlink()
    with pytest.raises(ConfigError, match="is not complete"):
        read_logits_manifest(folder)
    pool.run(1, cache, words, str(folder), 8, "fp16")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    with pytest.raises(WorkerError, match="outputs of another teacher, or for other samples"):
        pool.run(1, cache, words, str(folder), 4, "fp16")


def wrong_samples(rank: int, world_size: int, words: list[str]) -> int:
    """Train with the outputs of the next sample."""
    read = LogitsReader.read

    def later(self: LogitsReader, first: int, count: int) -> TopTokens:
        return read(self, (first + 1) % 8, count)

    with mock.patch.object(LogitsReader, "read", later):
        return train_rank(rank, world_size, words)


def test_outputs_of_another_sample_end_the_run(whole: Path, pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"not finite|NotFinite"):
        pool.run(1, wrong_samples, [*STUDENT, "--logits-load-dir", str(whole)])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--seed 5", "other samples"),
        ("--seq-length 8", "samples of 16 tokens"),
        ("--vocab-size 100", "for 101 tokens"),
        ("--train-iters 5", "and the run reads"),
        ("--dataloader-type cyclic", "is not supported together with --dataloader-type cyclic"),
        ("--logits-load-dir /nowhere", "No such file"),
    ],
)
def test_outputs_for_another_run_are_refused(whole: Path, flags: str, named: str) -> None:
    words = [*STUDENT, "--logits-load-dir", str(whole), *flags.split()]
    with pytest.raises(ConfigError) as caught, joined_ranks(parse(words)):
        pass
    assert caught.value.exit_code == 2
    assert any(named in problem.text for problem in caught.value.problems), caught.value.problems
    assert all(isinstance(problem.fix, str) and problem.fix for problem in caught.value.problems)


def test_a_damaged_folder_is_named(whole: Path, tmp_path: Path) -> None:
    content: dict[str, Any] = json.loads((whole / "manifest.json").read_text())
    for text in ("{", json.dumps(content | {"version": 2}), json.dumps(content | {"dtype": "fp8"})):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ConfigError, match=r"manifest\.json"):
            read_logits_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"shard-000000\.bin is missing"):
        read_logits_manifest(tmp_path)
