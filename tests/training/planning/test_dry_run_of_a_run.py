"""A dry run and the run agree: parameters of several kinds of models, rates of a run that skips iterations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from metrics_files import logged_steps
from run_helpers import command_line

import pretrain
from megatrain.config import parse
from megatrain.config.environment import LaunchEnvironment
from megatrain.training.planning.data_and_timeline import Landmark
from megatrain.training.planning.dry_run import DryRun, examine
from megatrain.training.planning.dry_run_output import as_text

EXPERTS = {
    "--num-experts": "7",
    "--moe-ffn-hidden-size": "5",
    "--moe-router-topk": "3",
    "--hidden-size": "40",
}
LATENTS = {
    "--multi-latent-attention": "", "--q-lora-rank": "12", "--kv-lora-rank": "8", "--qk-head-dim": "8",
    "--qk-pos-emb-head-dim": "4", "--v-head-dim": "8",
}  # fmt: skip
MODELS: dict[str, dict[str, str | None]] = {
    "dense": {},
    "experts": {**EXPERTS},
    "experts with biases, latent and shared": {
        **EXPERTS, "--disable-bias-linear": None, "--moe-latent-size": "9",
        "--moe-shared-expert-intermediate-size": "11", "--moe-layer-freq": "[0,1,1,0]",
    },
    "experts and multi-token prediction": {**EXPERTS, "--mtp-num-layers": "1"},
    "latents, experts and multi-token prediction": {**LATENTS, **EXPERTS, "--mtp-num-layers": "2"},
    "tied linear attention": {
        "--experimental-attention-variant": "gated_delta_net", "--linear-attention-freq": "2",
        "--linear-num-key-heads": "2", "--linear-num-value-heads": "4", "--linear-key-head-dim": "8",
        "--linear-value-head-dim": "8",
    },
}  # fmt: skip


def examined(changed: dict[str, str | None]) -> DryRun:
    return examine(parse([*command_line(changed), "--dry-run"]), LaunchEnvironment())


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_parameters_are_those_of_the_run(
    model: dict[str, str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    changed = {**model, "--train-iters": "1"}
    assert pretrain.main(command_line(changed)) == 0
    shown = re.search(r"> model: (.* parameters(, .* active per token)?); rank 0", capsys.readouterr().out)
    assert shown is not None
    found = examined(changed)
    assert f"model: {shown.group(1)}\n" in as_text(found) + "\n"
    if "--num-experts" in model:
        unselected = found.model.parameters - found.model.active_parameters
        assert unselected * 7 == found.model.by_part["experts"] * 4


def marks_of(changed: dict[str, str | None]) -> dict[str, Landmark]:
    return {mark.what: mark for mark in examined(changed).timeline.landmarks}


def metrics_of(folder: Path, changed: dict[str, str | None]) -> dict[int, dict[str, Any]]:
    """Train, and return the metrics of each iteration since."""
    before = len(logged_steps(folder)) if (folder / "metrics.jsonl").exists() else 0
    assert pretrain.main(command_line(changed)) == 0
    return {line["iteration"]: line for line in logged_steps(folder)[before:]}


SKIPPING: dict[str, str | None] = {
    "--train-iters": "12", "--lr-warmup-iters": "3", "--lr-decay-iters": "8", "--lr-decay-style": "WSD",
    "--lr-wsd-decay-iters": "3", "--lr-wsd-decay-style": "linear", "--micro-batch-size": "2", "--log-interval": "1",
}  # fmt: skip


@pytest.mark.parametrize("skipped", ["0 1", "3", "2 4 5 10", "8 11"])
def test_the_rates_are_those_of_a_run_that_skips_iterations(tmp_path: Path, skipped: str) -> None:
    changed = {**SKIPPING, "--iterations-to-skip": skipped, "--save": str(tmp_path)}
    marks, lines = marks_of(changed), metrics_of(tmp_path, changed)
    assert marks["start"].iteration == min(lines)
    assert marks["last iteration"].iteration == max(lines)
    whole = marks_of(SKIPPING)
    rates = {what: mark.lr for what, mark in whole.items() if what in marks and what != "last iteration"}
    assert {what: marks[what].lr for what in rates} == rates  # the same phases of the schedule, later
    for mark in marks.values():
        line = lines[mark.iteration]
        assert line["learning_rate"] == mark.lr
        assert line["consumed_samples"] == mark.consumed_samples + mark.global_batch_size


def test_the_rates_of_a_resumed_run_go_by_the_samples_that_were_not_skipped(tmp_path: Path) -> None:
    folder: dict[str, str | None] = {"--save": str(tmp_path), "--load": str(tmp_path)}
    before = {**SKIPPING, **folder, "--iterations-to-skip": "1 2", "--exit-interval": "4"}
    assert pretrain.main(command_line(before)) == 75
    after = {**SKIPPING, **folder, "--iterations-to-skip": "6"}
    marks, lines = marks_of(after), metrics_of(tmp_path, after)
    assert set(marks) == {"start", "warm-up ends", "decay starts", "decay ends", "last iteration"}
    assert {what: lines[mark.iteration]["learning_rate"] for what, mark in marks.items()} == {
        what: mark.lr for what, mark in marks.items()
    }
