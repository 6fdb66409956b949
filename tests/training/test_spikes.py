"""Losses and gradient norms that jump are told, once they have been steady for a while."""

import math

import pytest
from test_broken_command_lines import command_line

import pretrain
from megatrain.training.debugging.spikes import STEPS_THAT_COUNT, SpikeWatch
from megatrain.training.step_report import PendingStep


def test_what_is_ten_times_the_largest_is_told() -> None:
    watch = SpikeWatch("gradient norm")
    assert [watch.look(value) for value in (1.0, -3.0, 1e9 * math.inf, *[2.0] * (STEPS_THAT_COUNT - 2))] == [
        None
    ] * (STEPS_THAT_COUNT + 1)
    assert watch.look(29.9) is None
    assert watch.look(31.0) == "gradient norm 31 is more than 10 times the largest of the first 100 steps, 3"
    assert watch.look(math.nan) is None
    assert watch.largest == 3.0


@pytest.mark.parametrize("flag", ["--check-for-large-grads", "--check-for-spiky-loss", None])
def test_a_jump_is_told_where_it_is_asked_for(
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
    monkeypatch.setattr("megatrain.training.debugging.spikes.STEPS_THAT_COUNT", 2)
    assert pretrain.main(command_line({"--train-iters": "4"} | ({flag: ""} if flag else {}))) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "more than 10 times" in line]
    names = {"--check-for-large-grads": "gradient norm", "--check-for-spiky-loss": "lm loss"}
    assert len(told) == (1 if flag else 0)
    if flag:
        assert told[0].startswith(f"> iteration 3: {names[flag]} ")
