"""`megatrain plan --failures`: losses a day, against numbers known from elsewhere."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from megatrain.tools.main import main
from megatrain.tools.plan.failures import Losses, text

LLAMA = Losses(failures_a_day=7.8, step=9.0, interval=418.0, save=1.0, restart=395.0, hang=600.0)
FLAGS = ["plan", "--config", "configs/models/gpt2_124m.yaml", "--world-size", "8", "--top", "1"]


def test_losses_are_a_sum_of_causes() -> None:
    seconds = LLAMA.seconds
    assert seconds == {
        "saves": pytest.approx(86400 / 418),
        "hangs until found": pytest.approx(7.8 * 150),
        "restarts": pytest.approx(7.8 * 395),
        "computed again": pytest.approx(7.8 * 209),
    }
    assert LLAMA.share == pytest.approx(sum(seconds.values()) / 86400)


def test_no_other_interval_is_better_than_the_best() -> None:
    best = LLAMA.best_interval
    assert best == pytest.approx(math.sqrt(2 * 1.0 * 86400 / 7.8))
    shares = [
        dataclasses.replace(LLAMA, interval=best * factor).share for factor in (0.5, 0.9, 1.0, 1.1, 2.0)
    ]
    assert min(shares) == shares[2]


def test_the_command_prints_losses_and_the_best_interval(capsys: pytest.CaptureFixture[str]) -> None:
    main([*FLAGS, "--failures", "--failures-a-day", "4", "--save-interval", "1000", "--json"])
    found = json.loads(capsys.readouterr().out)["failures"]
    assert found["failures_a_day"] == 4
    assert found["interval"] == pytest.approx(1000 * found["step"])
    assert found["best_share"] <= found["share"]
    assert found["best_interval"] == pytest.approx(math.sqrt(2 * 5 * 86400 / 4))
    assert "best: a save every" in "\n".join(text(LLAMA))


def test_restarts_that_a_run_has_recorded_are_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"generation": 2 + i, "seconds": 10.0 * (1 + i)}) for i in range(3)]
    (tmp_path / "restarts.jsonl").write_text("\n".join(lines))
    assert main([*FLAGS, "--failures", "--save", str(tmp_path)]) == 0
    assert "a restart takes 20.0 s: median of 3 of this run" in capsys.readouterr().out
    (tmp_path / "restarts.jsonl").write_text("[]")
    assert main([*FLAGS, "--failures", "--save", str(tmp_path)]) == 2
    assert "fix: remove it, or give --restart-seconds" in capsys.readouterr().err


def test_a_time_below_0_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--failures", "--restart-seconds", "-1"]) == 2
    assert "fix: give --restart-seconds a number above 0" in capsys.readouterr().err
