"""A pruned model trains on under any layout, with its source as the teacher, is exported, and is the same from each kind of checkpoint."""

from pathlib import Path

import numpy as np
import pytest
from canonical_weights import hash_tensors
from run_here import train_here, train_rank
from test_distillation_runs import steps

from megatrain.checkpoint.parts import read_manifest
from megatrain.data.indexed.writer import IndexedWriter
from megatrain.tools.main import main
from megatrain.tools.worker_pool import WorkerPool

SIZES = "--num-layers 2 --hidden-size 24 --num-attention-heads 2 --ffn-hidden-size 32"
RUN = (
    "--mock-data --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --lr-warmup-iters 0 --eval-iters 0 --device cpu "
    "--log-interval 1 --no-kd-skip-lm-loss --make-vocab-size-divisible-by 1"
)


@pytest.fixture(scope="module")
def source(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that two tensor ranks saved, and of a calibration set."""
    folder = tmp_path_factory.mktemp("source")
    flags = f"--train-iters 2 --lr-warmup-iters 0 --eval-iters 0 --save {folder} --tensor-model-parallel-size 2".split()
    assert pool.run(2, train_here, flags) == [0, 0]
    with IndexedWriter(str(folder / "text"), "uint16") as writer:
        writer.add_document([np.random.default_rng(0).integers(0, 101, 500)])
    return folder


def prune(load: Path, source: Path, save: Path) -> None:
    words = f"prune --load {load} --save {save} --data-path {source}/text --samples 8 --device cpu {SIZES}"
    assert main(words.split()) == 0


@pytest.mark.nightly
def test_it_trains_on_under_tensor_and_pipeline_parallelism_and_is_exported(
    source: Path, pool: WorkerPool, tmp_path: Path
) -> None:
    prune(source, source, tmp_path / "pruned")
    words = (
        f"--finetune --load {tmp_path}/pruned --use-checkpoint-args --export-kd-teacher-load {source} {RUN}"
    )
    run = [*words.split(), "--train-iters", "3"]
    layouts = {"one": (1, ""), "four": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")}
    for name, (size, flags) in layouts.items():
        given = [
            *run,
            *flags.split(),
            "--metrics-file",
            f"{tmp_path}/{name}",
            "--save",
            f"{tmp_path}/run-{name}",
        ]
        assert set(pool.run(size, train_rank, given)) == {0}
    one, four = (steps(tmp_path / name) for name in layouts)
    assert len(one) == 3
    for first, other in zip(one, four, strict=True):
        assert first["lm_loss"] == pytest.approx(other["lm_loss"], rel=1e-5)
    assert main(["convert", "megatrain-to-hf", str(tmp_path / "pruned"), str(tmp_path / "hf")]) == 0
    config = read_manifest(tmp_path / "run-four" / "iter_0000003").config["model"]
    assert (config["num_layers"], config["hidden_size"], config["num_query_groups"]) == (2, 24, 2)


def test_a_checkpoint_of_megatron_is_pruned_as_ours(source: Path, tmp_path: Path) -> None:
    assert main(["convert", "megatrain-to-megatron", str(source), str(tmp_path / "theirs")]) == 0
    for name, load in {"ours": source, "taken": tmp_path / "theirs"}.items():
        prune(load, source, tmp_path / name)
    ours, theirs = (hash_tensors(tmp_path / name / "iter_0000000") for name in ("ours", "taken"))
    assert ours == theirs
