"""Resuming runs with further state: a batch size ramp, a loss scale, momentum, expert biases, a pretrained checkpoint."""

import functools
import json
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from canonical_weights import hash_tensors
from metrics_files import logged_losses, logged_steps
from run_here import UnbrokenRuns, folder_flags, train_here
from test_resume import metrics

from megatrain.checkpoint.find import newest_valid
from megatrain.checkpoint.parts import read_manifest
from megatrain.optim.loss_scale import DynamicLossScaler
from megatrain.parallel.fp8.amax_history import AmaxHistory
from megatrain.tools.parity.measure import engine_of, local_batches, tiny_plan
from megatrain.tools.parity.rows import Layout
from megatrain.tools.worker_pool import WorkerError, WorkerPool
from megatrain.training.build import build_schedules
from megatrain.training.losses import Losses

RAMP = (
    "--train-iters none --lr-warmup-iters 0 --lr-warmup-samples 16 --train-samples 120 "
    "--global-batch-size 12 --rampup-batch-size 4 4 40"
)
STEPS = (
    "--train-iters none --lr-warmup-iters 0 --train-samples 120 --global-batch-size auto "
    "--step-batch-size-schedule 0:4,320:8,0.8K:16"
)
RUNS = {
    "ramp": (1, RAMP),
    "ramp dp2 pp2": (4, f"{RAMP} --pipeline-model-parallel-size 2"),
    "steps dp2": (2, STEPS),
    "fp16": (1, "--fp16 --loss-scale-window 3 --initial-loss-scale 8e6"),
    "fp16 tp2 dp2": (4, "--fp16 --loss-scale-window 3 --initial-loss-scale 8e6 --tensor-model-parallel-size 2"),
    "sgd dp2": (2, "--optimizer sgd --lr-decay-style WSD --lr-wsd-decay-iters 5"),
    "bf16 moments dp2": (2, "--bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"),
    "bf16 dp2": (2, "--bf16"),
    "adaptive muon, lion and clipped logits tp2 dp2": (4, (
        "--bf16 --optimizer adaptive_muon --muon-nesterov --muon-scalar-optimizer lion --qk-clip --qk-clip-threshold 1e-3"
        " --tensor-model-parallel-size 2")),
    "soap tp2 dp2": (4, "--bf16 --optimizer soap --soap-precondition-frequency 3 --tensor-model-parallel-size 2"),
    "fp8 delayed pp2": (2, ("--bf16 --fp8-format hybrid --fp8-amax-history-len 4 --fp8-amax-compute-algo max"
                            " --pipeline-model-parallel-size 2")),
    "fp8 delayed gather dp2": (2, "--bf16 --fp8-format hybrid --fp8-amax-history-len 4 --fp8-param-gather"),
    "fp8 delayed gather zero3 dp2": (2, ("--bf16 --fp8-format hybrid --fp8-amax-history-len 4 --fp8-param-gather"
                                         " --data-parallel-sharding-strategy optim_grads_params")),
    "fp8 tensorwise tp2 dp2": (4, ("--bf16 --fp8-format hybrid --fp8-recipe tensorwise --tensor-model-parallel-size 2"
                                   " --first-last-layers-bf16")),
    "cp2 dp2": (4, "--context-parallel-size 2"),
    "packs on groups of four": (4, ("--pack-documents --dynamic-context-parallel --max-seqlen-per-dp-cp-rank 16 --micro-batch-size 1"
                                    " --calculate-per-token-loss --seq-length 64 --hidden-dropout 0.1"
                                    ' --varlen-mock-dataset-config-json {"type":"uniform","min_seq_len":3,"max_seq_len":65}')),
    "packs over stages and experts": (4, ("--pack-documents --dynamic-context-parallel --micro-batch-size 1 --calculate-per-token-loss"
                                          " --seq-length 64 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2"
                                          " --num-experts 4 --moe-ffn-hidden-size 24 --moe-router-load-balancing-type seq_aux_loss"
                                          " --moe-aux-loss-coeff 0.01 --moe-router-score-function sigmoid"
                                          " --moe-router-enable-expert-bias"
                                          ' --varlen-mock-dataset-config-json {"type":"uniform","min_seq_len":3,"max_seq_len":65}')),
    "experts ep2 dp2 pp2": (4, ("--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --num-experts 4"
                                " --moe-ffn-hidden-size 24 --moe-layer-freq [0,1,0,1] --moe-router-score-function sigmoid"
                                " --moe-router-enable-expert-bias --moe-input-jitter-eps 0.1"
                                " --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01")),
    "quantiles of biased latent experts ep2 dp2": (2, (
        "--expert-model-parallel-size 2 --num-experts 4 --moe-ffn-hidden-size 24 --moe-latent-size 16"
        " --no-disable-bias-linear --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type quantile_balancing"
        " --moe-router-quantile-balancing-ema 0.5 --moe-shared-expert-intermediate-size 24")),
    "per token dp2": (2, ("--calculate-per-token-loss --decoupled-lr 2e-2 --weight-decay-incr-style linear"
                          " --start-weight-decay 0 --end-weight-decay 0.1 --manual-gc --manual-gc-interval 3")),
}  # fmt: skip


def train(pool: WorkerPool, name: str, folder: Path, *flags: str) -> set[int]:
    world_size, run = RUNS[name]
    return set(pool.run(world_size, train_here, [*run.split(), *folder_flags(folder), *flags]))


def hashes(folder: Path) -> list[dict[str, str]]:
    newest = newest_valid(folder)
    assert newest is not None
    kinds = {kind for tensor in read_manifest(newest.path).tensors.values() for kind in tensor.kinds}
    return [hash_tensors(newest.path, kind) for kind in sorted(kinds)]


def state(folder: Path) -> dict[str, Any]:
    newest = newest_valid(folder)
    assert newest is not None
    return dict(read_manifest(newest.path).state)


@pytest.fixture(scope="session")
def whole(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> UnbrokenRuns:
    return UnbrokenRuns(functools.partial(train, pool), tmp_path_factory)


ALWAYS = ("ramp", "fp16", "soap tp2 dp2")
"""Runs that every test run stops and resumes; nightly runs do so with the others."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.nightly) for name in RUNS]
)
def test_stopped_twice_and_resumed_equals_never_stopped(
    pool: WorkerPool, whole: UnbrokenRuns, tmp_path: Path, name: str
) -> None:
    assert train(pool, name, tmp_path, "--exit-interval", "5") == {75}
    assert train(pool, name, tmp_path, "--exit-interval", "7") == {75}
    assert train(pool, name, tmp_path) == {0}
    assert metrics(tmp_path) == metrics(whole[name])
    assert hashes(tmp_path) == hashes(whole[name])
    assert state(tmp_path) == state(whole[name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["adaptive muon, lion and clipped logits tp2 dp2", "soap tp2 dp2"])
def test_matrices_resume_under_another_layout(
    pool: WorkerPool, whole: UnbrokenRuns, tmp_path: Path, name: str
) -> None:
    assert train(pool, name, tmp_path, "--exit-interval", "10") == {75}
    flags = [*RUNS[name][1].split()[:-2], *folder_flags(tmp_path)]
    assert set(pool.run(2, train_here, flags)) == {0}
    for line, expected in zip(metrics(tmp_path), metrics(whole[name]), strict=True):
        if "lm_loss" in expected:
            assert line["lm_loss"] == pytest.approx(expected["lm_loss"], rel=3e-3)


@pytest.mark.nightly
def test_packs_of_a_run_that_is_killed_at_random_moments_are_those_of_an_unbroken_one(
    pool: WorkerPool, whole: UnbrokenRuns, tmp_path: Path
) -> None:
    name, chance, num_kills = "packs on groups of four", random.Random(0), 0
    world_size, run = RUNS[name]
    while num_kills < 3:
        try:
            seconds = chance.uniform(0.2, 4)
            pool.run(world_size, train_here, [*run.split(), *folder_flags(tmp_path)], seconds)
        except WorkerError:
            num_kills += 1
            continue
        break
    assert num_kills
    assert train(pool, name, tmp_path) == {0}
    assert metrics(tmp_path) == metrics(whole[name])
    assert hashes(tmp_path) == hashes(whole[name])


@pytest.mark.nightly
def test_packs_resume_under_another_layout(pool: WorkerPool, whole: UnbrokenRuns, tmp_path: Path) -> None:
    name = "packs on groups of four"
    assert train(pool, name, tmp_path, "--exit-interval", "10") == {75}
    flags = [
        word
        for word in RUNS[name][1].split()
        if word not in ("--dynamic-context-parallel", "--max-seqlen-per-dp-cp-rank")
    ]
    flags = [
        *(word for word in flags if word != "16"),
        "--context-parallel-size",
        "2",
        *folder_flags(tmp_path),
    ]
    assert set(pool.run(2, train_here, flags)) == {0}
    for line, expected in zip(metrics(tmp_path), metrics(whole[name]), strict=True):
        if "lm_loss" in expected:
            assert line["lm_loss"] == pytest.approx(expected["lm_loss"], rel=1e-4)


@pytest.mark.nightly
def test_expert_biases_have_changed(whole: UnbrokenRuns) -> None:
    biases = state(whole["experts ep2 dp2 pp2"])["expert_biases"]
    assert sorted(biases) == [f"decoder.layers.{layer}.mlp.router.expert_bias" for layer in (1, 3)]
    assert all(any(values) for values in biases.values())


@pytest.mark.nightly
def test_a_run_that_loses_the_history_of_fp8_differs(
    pool: WorkerPool, whole: UnbrokenRuns, tmp_path: Path
) -> None:
    name = "fp8 delayed pp2"
    history = state(whole[name])["amax_history"]
    assert {len(entries) for entries in history.values()} <= {1, 2, 3, 4}
    assert len(history) == 4 * 4 * 3  # layers, linear layers, tensors
    assert train(pool, name, tmp_path, "--exit-interval", "5") == {75}
    assert set(pool.run(2, train_without_history, [*RUNS[name][1].split(), *folder_flags(tmp_path)])) == {0}
    assert hashes(tmp_path) != hashes(whole[name])


def train_without_history(rank: int, world_size: int, flags: list[str]) -> int:
    with mock.patch.object(AmaxHistory, "restore"):
        return train_here(rank, world_size, flags)


def test_batch_sizes_and_learning_rates_follow_the_samples(whole: UnbrokenRuns) -> None:
    steps = logged_steps(whole["ramp"])
    assert [line["global_batch_size"] for line in steps] == [4] * 5 + [8] * 3 + [12] * 6
    assert [line["consumed_samples"] for line in steps][-1] == 116
    assert steps[4]["learning_rate"] == pytest.approx(1e-2)  # after 16 samples of warm-up
    steps = logged_steps(whole["steps dp2"])
    assert [line["global_batch_size"] for line in steps] == [4] * 5 + [8] * 4 + [16] * 5


@pytest.mark.nightly
def test_moments_are_stored_in_their_dtype_and_may_become_fp32_again(
    pool: WorkerPool, whole: UnbrokenRuns, tmp_path: Path
) -> None:
    name = "bf16 moments dp2"
    found = newest_valid(whole[name])
    assert found is not None
    for tensor in read_manifest(found.path).tensors.values():
        assert {kind: stored.dtype for kind, stored in tensor.kinds.items()} == {
            "weight": "F32",
            "exp_avg": "BF16",
            "exp_avg_sq": "BF16",
        }
    assert train(pool, name, tmp_path, "--exit-interval", "5") == {75}
    assert train(pool, name, tmp_path, "--exp-avg-sq-dtype", "fp32") == {0}
    newest = newest_valid(tmp_path)
    assert newest is not None
    tensors = read_manifest(newest.path).tensors.values()
    assert {tensor.kinds["exp_avg_sq"].dtype for tensor in tensors} == {"F32"}


@pytest.mark.nightly
def test_optimizer_state_may_move_to_the_host_and_back(
    pool: WorkerPool, whole: UnbrokenRuns, tmp_path: Path
) -> None:
    name, offload = "bf16 dp2", ("--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.5")
    assert train(pool, name, tmp_path, "--exit-interval", "5") == {75}
    assert train(pool, name, tmp_path, "--exit-interval", "12", *offload) == {75}
    assert train(pool, name, tmp_path) == {0}
    assert metrics(tmp_path) == metrics(whole[name])
    assert hashes(tmp_path) == hashes(whole[name])


@pytest.mark.parametrize("name", ["fp16", pytest.param("fp16 tp2 dp2", marks=pytest.mark.nightly)])
def test_steps_that_overflow_are_skipped_and_not_scheduled(whole: UnbrokenRuns, name: str) -> None:
    steps = logged_steps(whole[name])
    assert steps[0]["loss_scale"] == 8e6
    assert steps[0]["skipped"] == 1
    assert steps[0]["learning_rate"] == steps[1]["learning_rate"] == 0.0
    skipped = sum(line["skipped"] for line in steps)
    assert 0 < skipped < 15
    assert state(whole[name])["scheduled_samples"] == 8 * (20 - skipped)
    newest = newest_valid(whole[name])
    assert newest is not None
    assert read_manifest(newest.path).optimizer_step_count == 20 - skipped
    assert steps[-1]["lm_loss"] < steps[0]["lm_loss"]
    assert len({line["loss_scale"] for line in steps}) > 2


def test_a_ramp_resumes_under_another_layout(pool: WorkerPool, whole: UnbrokenRuns, tmp_path: Path) -> None:
    assert train(pool, "ramp", tmp_path, "--exit-interval", "6") == {75}
    assert train(pool, "ramp dp2 pp2", tmp_path) == {0}
    losses, batches = (
        [[line[key] for line in metrics(folder) if key in line] for folder in (tmp_path, whole["ramp"])]
        for key in ("lm_loss", "global_batch_size")
    )
    assert losses[0] == pytest.approx(losses[1], rel=2e-5)
    assert batches[0] == batches[1]


def test_the_batch_size_may_change_when_resuming(pool: WorkerPool, tmp_path: Path) -> None:
    common = folder_flags(tmp_path)
    assert pool.run(1, train_here, [*common, "--exit-interval", "5"]) == [75]
    consent = "--override-opt-param-scheduler"
    flags = [*common, "--global-batch-size", "4", consent, "--eval-global-batch-size", "8"]
    assert pool.run(1, train_here, flags) == [0]
    found = [line["consumed_samples"] for line in logged_steps(tmp_path)]
    assert found == [8, 16, 24, 32, 40, *range(44, 101, 4)]


def test_finetuning_loads_only_weights(pool: WorkerPool, whole: UnbrokenRuns, tmp_path: Path) -> None:
    flags = [
        "--load",
        str(whole["ramp"]),
        "--save",
        str(tmp_path),
        "--finetune",
        "--no-save-optim",
        "--lr",
        "1e-4",
    ]
    assert pool.run(
        1, train_here, [*flags, "--train-iters", "2", "--eval-interval", "1", "--lr-warmup-iters", "0"]
    ) == [0]
    lines = metrics(tmp_path)
    assert [line["iteration"] for line in lines if "lm_loss" in line] == [1, 2]
    before = next(line["loss"] for line in lines if line["iteration"] == 0)
    fresh = next(line["loss"] for line in metrics(whole["ramp"]) if line["iteration"] == 0)
    assert before < 0.9 * fresh
    newest = newest_valid(tmp_path)
    assert newest is not None
    manifest = read_manifest(newest.path)
    assert {kind for tensor in manifest.tensors.values() for kind in tensor.kinds} == {"weight"}
    assert json.loads(json.dumps(manifest.state))["has_optimizer"] is False


def test_only_the_first_job_loads_the_pretrained_checkpoint(
    pool: WorkerPool, whole: UnbrokenRuns, tmp_path: Path
) -> None:
    flags = [*folder_flags(tmp_path), "--pretrained-checkpoint", str(whole["ramp"]), "--seed", "5"]
    assert pool.run(1, train_here, [*flags, "--exit-interval", "6"]) == [75]
    assert pool.run(1, train_here, flags) == [0]
    lines = logged_steps(tmp_path)
    assert [line["iteration"] for line in lines] == list(range(1, 21))
    fresh = logged_losses(whole["ramp"])[0]
    assert lines[0]["lm_loss"] < 0.9 * fresh


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_all_ranks_skip_a_step_that_is_not_finite_on_one(pool: WorkerPool, value: float) -> None:
    layout = Layout.of("tp2 sp dp2 zero1 pp2 tied")
    answers = pool.run(8, step_with_a_fault, layout, value)
    assert answers == [answers[0]] * 8
    assert answers[0] == [(False, True), (True, False)]


def step_with_a_fault(rank: int, world_size: int, layout: Layout, value: float) -> list[tuple[bool, bool]]:
    """Return for each of two steps (was it finite, are the weights unchanged); rank 5 spoils a gradient of the first."""
    plan = tiny_plan(layout, world_size)
    engine = engine_of(plan, rank)
    engine.loss_scaler = DynamicLossScaler(scale=1024.0, minimum=1.0, window=9, hysteresis=1)
    accumulate, found = engine.accumulate_gradients, []
    for step in range(2):
        before = torch.cat(engine.buffers.weights.full)

        def spoiled(
            batches: Any, *, is_spoiled: bool = step == 0 and rank == 5, first_sample: int = 0
        ) -> Losses:
            losses = accumulate(batches, first_sample=first_sample)
            if is_spoiled:
                engine.buffers.gradients.shards[1][0] = value
            return losses

        engine.accumulate_gradients = spoiled  # type: ignore[method-assign]
        report = engine.step(
            list(local_batches(step, layout, engine.grid.dp.rank)), build_schedules(plan).at(0)
        )
        assert engine.loss_scaler.scale == 512.0
        engine.data_parallel.wait_for_weights()
        found.append((report.is_finite, torch.equal(before, torch.cat(engine.buffers.weights.full))))
    return found
