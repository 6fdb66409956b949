"""Spikes of the loss and the gradient norm are reported after the reference steps."""

import math

import pytest
from run_helpers import command_line

import pretrain
from megatrain.training.faults.responses import REFERENCE_STEPS, SpikeDetector
from megatrain.training.step_report import PendingStep


def test_ten_times_the_largest_reference_value_is_a_spike() -> None:
    detector = SpikeDetector("gradient norm")
    assert [
        detector.check(value) for value in (1.0, -3.0, 1e9 * math.inf, *[2.0] * (REFERENCE_STEPS - 2))
    ] == [None] * (REFERENCE_STEPS + 1)
    assert detector.check(29.9) is None
    assert (
        detector.check(31.0) == "gradient norm 31 is more than 10 times the largest of the first 100 steps, 3"
    )
    assert detector.check(math.nan) is None
    assert detector.largest == 3.0


@pytest.mark.parametrize("flag", ["--check-for-large-grads", "--check-for-spiky-loss", None])
def test_a_spike_is_reported_with_its_flag(
    flag: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, calls = PendingStep.read, []

    def jumping(self):
        report = read(self)
        calls.append(None)
        factor = 1000.0 if len(calls) == 3 else 1.0
        return type(report)(
            **{**vars(report), "lm_loss": factor * report.lm_loss, "grad_norm": factor * report.grad_norm}
        )

    monkeypatch.setattr(PendingStep, "read", jumping)
    monkeypatch.setattr("megatrain.training.faults.responses.REFERENCE_STEPS", 2)
    assert pretrain.main(command_line({"--train-iters": "4"} | ({flag: ""} if flag else {}))) == 0
    reported = [line for line in capsys.readouterr().out.splitlines() if "more than 10 times" in line]
    names = {"--check-for-large-grads": "gradient norm", "--check-for-spiky-loss": "lm loss"}
    assert len(reported) == (1 if flag else 0)
    if flag:
        assert reported[0].startswith(f"> iteration 3: {names[flag]} ")
