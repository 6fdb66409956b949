"""Learning rates against Megatron-LM's, by the golden file."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.optim.schedule import LearningRate

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "schedules.json").read_text())
STYLES = ("constant", "linear", "cosine")
CASES = [case for case in GOLDEN["cases"] if case["arguments"]["lr_decay_style"] in STYLES]
CASES = [case for case in CASES if case["name"] != "parameter group overrides"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_rates_are_megatrons(case: dict[str, Any]) -> None:
    arguments = case["arguments"]
    rate = LearningRate(
        style=arguments["lr_decay_style"],
        peak=arguments["max_lr"],
        floor=arguments["min_lr"],
        init=arguments["init_lr"],
        warmup_samples=arguments["lr_warmup_steps"],
        decay_samples=arguments["lr_decay_steps"],
    )
    for samples, expected, *_ in case["values"]:
        assert rate.at(samples) == pytest.approx(expected, rel=1e-12, abs=0)
