"""--iterations-to-skip: samples are passed over, schedules stay, and a resumed run skips the same iterations."""

from pathlib import Path
from typing import Any

import pytest
from metrics_files import logged_steps
from run_helpers import command_line

import pretrain


def lines_of(folder: Path, flags: dict[str, str | None], *, exit_code: int = 0) -> dict[int, dict[str, Any]]:
    """Train six iterations in a folder; return the metrics by iteration."""
    same = {"--save": str(folder), "--load": str(folder), "--train-iters": "6", "--lr-warmup-iters": "3"}
    assert pretrain.main(command_line({**same, **flags})) == exit_code
    return {line["iteration"]: line for line in logged_steps(folder)}


@pytest.mark.parametrize("skipped", ["0", "2", "1 2", "5"])
def test_samples_are_passed_over_and_schedules_stay(tmp_path: Path, skipped: str) -> None:
    whole = lines_of(tmp_path / "whole", {})
    found = lines_of(tmp_path / "skipping", {"--iterations-to-skip": skipped})
    numbers = [number for number in whole if str(number - 1) not in skipped.split()]
    assert list(found) == numbers
    for place, number in enumerate(numbers, 1):
        assert found[number]["consumed_samples"] == whole[number]["consumed_samples"]
        assert found[number]["learning_rate"] == whole[place]["learning_rate"]
    first = numbers[0]
    if first == 1:
        assert found[1]["lm_loss"] == whole[1]["lm_loss"]
    else:  # the same weights on other samples
        assert found[first]["lm_loss"] != whole[1]["lm_loss"]


def test_a_run_that_stops_at_a_skipped_iteration_resumes_to_the_same_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags: dict[str, str | None] = {"--iterations-to-skip": "2", "--save-interval": "3"}
    whole = lines_of(tmp_path / "whole", flags)
    lines_of(tmp_path / "cut", {**flags, "--exit-interval": "3"}, exit_code=75)
    assert "> iteration 3 is skipped (--iterations-to-skip 2)" in capsys.readouterr().out
    cut = lines_of(tmp_path / "cut", flags)
    assert {n: line["lm_loss"] for n, line in cut.items()} == {
        n: line["lm_loss"] for n, line in whole.items()
    }
