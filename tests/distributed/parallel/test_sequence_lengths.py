"""Training with --seq-length-schedule: the same under every layout, resumed within and at a change of the length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from metrics_files import logged_lines
from run_here import UnbrokenRuns, folder_flags, train_here

from megatrain.tools.worker_pool import WorkerPool

SCHEDULE = "--train-iters 9 --params-dtype float64 --hidden-dropout 0.1 --eval-interval 4 --seq-length-schedule 0:4,384:8,800:16"
"""An iteration has 128 tokens, so that the length changes after iterations 3 and 7: 800 tokens are 50 samples, within the 7th."""
LAYOUTS = {
    "cp2 pp2": (4, "--context-parallel-size 2 --pipeline-model-parallel-size 2"),
    "tp2 sp cp2": (4, ("--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2"
                       " --cp-comm-type all_gather")),
    "heads on cp2, dp2": (4, "--context-parallel-size 2 --cp-comm-type a2a"),
    "interleaved pp2 dp2": (4, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "zero3 dp4": (4, "--data-parallel-sharding-strategy optim_grads_params --micro-batch-size 1"),
}  # fmt: skip
MODELS = {
    "dense": "",
    "predicts two": "--mtp-num-layers 1",
    "experts": "--num-experts 4 --moe-ffn-hidden-size 24 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01",
    "documents": "--reset-attention-mask --reset-position-ids --null-tokenizer-eod-id 5",
    "latents": "--multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --no-group-query-attention --num-query-groups auto",
}
EVERY_DAY = {("dense", "cp2 pp2")}


def train(pool: WorkerPool, model: str, layout: str, folder: Path, *flags: str) -> set[int]:
    world_size, words = LAYOUTS.get(layout, (1, ""))
    given = [*SCHEDULE.split(), *MODELS[model].split(), *words.split(), *folder_flags(folder), *flags]
    return set(pool.run(world_size, train_here, given))


def losses(folder: Path) -> list[dict[str, Any]]:
    names = ("iteration", "seq_length", "consumed_tokens", "lm_loss", "grad_norm", "learning_rate", "loss")
    return [{name: line[name] for name in names if name in line} for line in logged_lines(folder)]


@pytest.fixture(scope="session")
def whole(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> UnbrokenRuns:
    def run(model: str, folder: Path) -> set[int]:
        return train(pool, model, "one process", folder)

    return UnbrokenRuns(run, tmp_path_factory)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, layout, marks=[] if (model, layout) in EVERY_DAY else pytest.mark.nightly)
        for model in MODELS
        for layout in (LAYOUTS if model == "dense" else ("cp2 pp2", "tp2 sp cp2"))
    ],
)
def test_layouts_train_the_same_pieces(
    pool: WorkerPool, whole: UnbrokenRuns, tmp_path: Path, model: str, layout: str
) -> None:
    assert train(pool, model, layout, tmp_path, "--exit-interval", "3") == {75}
    assert train(pool, model, layout, tmp_path, "--exit-interval", "5") == {75}
    assert train(pool, model, layout, tmp_path) == {0}
    found, expected = losses(tmp_path), losses(whole[model])
    assert len(found) == len(expected)
    for line, other in zip(found, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-9)
    assert [line["seq_length"] for line in found if "seq_length" in line] == [4] * 3 + [8] * 4 + [16] * 2


@pytest.mark.parametrize(
    "model", [pytest.param(one, marks=[] if one == "dense" else pytest.mark.nightly) for one in MODELS]
)
def test_a_run_resumes_to_the_bit(pool: WorkerPool, whole: UnbrokenRuns, tmp_path: Path, model: str) -> None:
    for exit_interval in ("2", "7", "9"):
        train(pool, model, "one process", tmp_path, "--exit-interval", exit_interval)
    assert losses(tmp_path) == losses(whole[model])


@pytest.mark.nightly
def test_the_tokens_are_those_of_whole_samples(pool: WorkerPool, whole: UnbrokenRuns, tmp_path: Path) -> None:
    """Consumed tokens and learning rates are those of a run without a schedule; losses differ where attention ends earlier."""
    flags = ["--seq-length-schedule", "0:16"]
    assert train(pool, "dense", "one process", tmp_path, *flags) == {0}
    names = ("iteration", "consumed_tokens", "learning_rate")
    lines, others = losses(tmp_path), losses(whole["dense"])
    assert [[line.get(name) for name in names] for line in lines] == [
        [line.get(name) for name in names] for line in others
    ]
    assert lines[0]["loss"] == others[0]["loss"], "evaluation at the start reads whole samples"
    assert lines[1]["lm_loss"] != others[1]["lm_loss"]
