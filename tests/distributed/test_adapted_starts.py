"""Runs that start with the weights of a model that differs in what --finetune may change; restarts in the same folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from everyday import one_in
from run_here import metrics, train_here
from torch import Tensor

from megatrain.checkpoint.find import newest_valid
from megatrain.checkpoint.reader import CheckpointReader
from megatrain.config import ConfigError
from megatrain.tools.worker_pool import WorkerPool

SHORT = "--num-layers 2 --train-iters 1 --lr-warmup-iters 0 --eval-iters 0 --make-vocab-size-divisible-by 64".split()
STILL = ["--lr", "1e-30", "--min-lr", "0"]
"""A learning rate at which weights keep their values."""
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel".split()
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


def train(pool: WorkerPool, *flags: str, world_size: int = 2) -> set[int]:
    layout = TP2 if world_size == 2 else []
    return set(pool.run(world_size, train_here, [*SHORT, *layout, *flags]))


def weights(folder: Path) -> dict[str, Tensor]:
    newest = newest_valid(folder)
    assert newest is not None
    with CheckpointReader(newest.path) as reader:
        return {name: reader.values(name, tensor.shape) for name, tensor in reader.manifest.tensors.items()}


def start(pool: WorkerPool, origin: Path, folder: Path, *flags: str) -> dict[str, Tensor]:
    """Start a run with the weights of `origin` that leaves them as they are; return its weights."""
    folders = ["--pretrained-checkpoint", str(origin), "--load", str(folder), "--save", str(folder)]
    assert train(pool, *folders, *STILL, *flags) == {0}
    return weights(folder)


@pytest.fixture(scope="module")
def origin(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two layers of multi-token prediction, tied, without biases, with 101 tokens in 128 rows."""
    folder = tmp_path_factory.mktemp("origin")
    assert train(pool, "--mtp-num-layers", "2", "--save", str(folder)) == {0}
    return folder


def test_an_untied_head_is_a_copy_of_the_embedding(pool: WorkerPool, origin: Path, tmp_path: Path) -> None:
    flags = "--untie-embeddings-and-output-weights --mtp-num-layers 2".split()
    found, before = start(pool, origin, tmp_path / "new", *flags), weights(origin)
    assert torch.equal(found[HEAD], before[EMBEDDING])
    assert {name: value for name, value in found.items() if name != HEAD}.keys() == before.keys()
    assert start(pool, origin, tmp_path / "tied", "--mtp-num-layers", "2").keys() == before.keys()
    untied, tied = (metrics(tmp_path / name)[0]["lm_loss"] for name in ("new", "tied"))
    assert untied == pytest.approx(tied, rel=1e-6)


@pytest.mark.parametrize(("flags", "kept"), [([], ()), (["--mtp-num-layers", "1"], ("mtp.layers.0.",))])
def test_layers_of_multi_token_prediction_are_dropped(
    pool: WorkerPool, origin: Path, tmp_path: Path, flags: list[str], kept: tuple[str, ...]
) -> None:
    found, before = start(pool, origin, tmp_path, *flags), weights(origin)
    assert found.keys() == {name for name in before if not name.startswith("mtp.") or name.startswith(kept)}
    assert all(torch.equal(value, before[name]) for name, value in found.items())


def test_new_biases_are_zero(pool: WorkerPool, origin: Path, tmp_path: Path) -> None:
    found, before = start(pool, origin, tmp_path / "biased", "--no-disable-bias-linear"), weights(origin)
    new = found.keys() - before.keys()
    assert new
    assert all(name.endswith(".bias") and found[name].abs().max() < 1e-29 for name in new)
    start(pool, origin, tmp_path / "plain")
    biased, plain = (metrics(tmp_path / name)[0]["lm_loss"] for name in ("biased", "plain"))
    assert biased == pytest.approx(plain, rel=1e-6)


def test_new_tokens_train_in_rows_of_padding(pool: WorkerPool, origin: Path, tmp_path: Path) -> None:
    before = weights(origin)[EMBEDDING]
    found = start(pool, origin, tmp_path / "still", "--vocab-size", "107")[EMBEDDING]
    assert found.shape == (107, 32)
    assert torch.equal(found[:101], before)
    assert 0.3 < found[101:].std() / before.std() < 3
    folders = ["--save", str(tmp_path / "trained"), "--load", str(origin), "--finetune"]
    assert train(pool, *folders, "--vocab-size", "107", "--lr", "1e-2") == {0}
    assert (
        weights(tmp_path / "trained")[EMBEDDING][101:] != found[101:]
    ).all()  # the softmax is over all tokens
    with pytest.raises(ConfigError, match="--vocab-size cannot differ from"):
        train_here(0, 1, [*SHORT, *folders, "--vocab-size", "129"])


def test_biases_of_experts_start_at_zero(pool: WorkerPool, tmp_path: Path) -> None:
    experts = "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid".split()
    biases = ["--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", "0"]
    assert train(pool, *experts, "--save", str(tmp_path / "old")) == {0}
    start(pool, tmp_path / "old", tmp_path / "new", *experts, *biases)
    newest = newest_valid(tmp_path / "new")
    assert newest is not None
    with CheckpointReader(newest.path) as reader:
        found = reader.manifest.state["expert_biases"]
    assert len(found) == 2
    assert not any(value for values in found.values() for value in values)


@pytest.mark.parametrize("kind", one_in(2, ["yarn", "rope"]))
def test_yarn_and_rope_take_weights_of_each_other(pool: WorkerPool, tmp_path: Path, kind: str) -> None:
    flags = {
        "rope": ["--position-embedding-type", "rope"],
        "yarn": "--position-embedding-type yarn --yarn-original-max-position-embeddings 16 --rotary-scaling-factor 2".split(),
    }
    other = "yarn" if kind == "rope" else "rope"
    assert train(pool, *flags[other], "--save", str(tmp_path / "old")) == {0}
    found, before = start(pool, tmp_path / "old", tmp_path / "new", *flags[kind]), weights(tmp_path / "old")
    assert all(torch.equal(found[name], value) for name, value in before.items())


@pytest.mark.parametrize("flag", ["--finetune", pytest.param("--no-load-optim", marks=pytest.mark.nightly)])
def test_a_flag_of_the_first_start_does_not_apply_to_restarts(
    pool: WorkerPool, tmp_path: Path, flag: str
) -> None:
    """The original is at a later iteration than the first checkpoints of a run with --finetune."""
    folder, longer = tmp_path / "one", ["--train-iters", "6", "--lr-decay-iters", "10"]
    run = [*longer, "--save", str(folder), "--load", str(folder)]
    assert train(pool, *run, "--exit-interval", "4", world_size=1) == {75}
    unbroken = [*longer, "--load", str(folder), flag, "--save", str(tmp_path / "unbroken")]
    if flag == "--no-load-optim":
        unbroken += ["--train-iters", "8"]
    assert train(pool, *unbroken, world_size=1) == {0}
    run = [*run, flag, *unbroken[-2:]] if flag == "--no-load-optim" else [*run, flag]
    first = "2" if flag == "--finetune" else "6"
    assert train(pool, *run, "--exit-interval", first, world_size=1) == {75}
    assert train(pool, *run, world_size=1) == {0}
    expected, found = (metrics(path) for path in (tmp_path / "unbroken", folder))
    losses = {line["iteration"]: line["lm_loss"] for line in expected if "lm_loss" in line}
    resumed = [line for line in found if "lm_loss" in line][-len(losses) :]
    assert {line["iteration"]: line["lm_loss"] for line in resumed} == losses
