"""Runs of Megatron-LM continue here: its recorded checkpoints, converted, give the recorded iterations 9 to 12."""

import json
from pathlib import Path

import pytest
from test_golden_training import Bounds, mean_mtp_losses, recordings, tf32_routers  # noqa: F401 (fixtures)

from megatrain.config import parse
from megatrain.tools.main import main
from megatrain.training.launch.ranks import joined_ranks
from megatrain.training.logging.console import Console, Phases
from megatrain.training.trainer import Trainer

CASES = {
    "dsv3": Bounds(5e-7, 4e-6),
    "gpt2": Bounds(5e-7, 5e-7),
    "llama": Bounds(5e-7, 5e-7),
    "mixtral": Bounds(5e-7, 5e-7),
    "qwen3moe": Bounds(5e-7, 4e-6),
    "mtp": Bounds(5e-7, 4e-6),
}
"""Measured: losses 6e-8, norms 1.4e-7; `qwen3moe` 1.3e-6, see `test_golden_training.py`; `mtp` 9e-8 and 1.2e-6."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("tf32_routers")
def test_a_converted_run_continues_with_the_recorded_digits(
    case: str,
    recordings: Path,  # noqa: F811 (the fixture)
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, metrics = recordings / f"{case}.ckpt", tmp_path / "metrics.jsonl"
    assert (
        main(["convert", "megatron-to-megatrain", str(source), str(tmp_path / "run"), "--vocab-size", "3072"])
        == 0
    )
    assert "iteration 8, 32 samples consumed" in capsys.readouterr().out
    recorded = json.loads((recordings / "flags.json").read_text())[case]
    flags = [flag.format(corpus=recordings.parent / "data/corpus_text_document") for flag in recorded]
    flags += f"--train-iters 12 --device cpu --vocab-size 3072 --load {tmp_path}/run --metrics-file {metrics}".split()
    with joined_ranks(parse(flags), Phases(Console(is_quiet=True))) as ranks:
        trainer = Trainer(ranks)
        trainer.resume()
        assert trainer.train() == 0
    found = [line for line in map(json.loads, metrics.read_text().splitlines()) if "lm_loss" in line]
    expected = json.loads((recordings / f"{case}.resumed.json").read_text())
    assert (
        [line["iteration"] for line in found] == [line["iteration"] for line in expected] == [9, 10, 11, 12]
    )
    bounds = CASES[case]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["lm_loss"] == pytest.approx(theirs["lm loss"], rel=bounds.lm_loss, abs=0)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=bounds.grad_norm, abs=0)
        if "mtp" in theirs:
            assert ours["mtp_losses"] == pytest.approx(mean_mtp_losses(theirs), rel=bounds.lm_loss, abs=0)
