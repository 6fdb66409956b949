"""The training loop with losses that are not finite, and with requests to stop."""

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from metrics_files import logged_lines
from run_helpers import command_line

import pretrain
from megatrain.training.engine import Engine
from megatrain.training.garbage import GarbageCollection
from megatrain.training.losses import Losses
from megatrain.training.stopping import StopRequest


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss and the gradients of the second step are NaN."""
    accumulate, calls = Engine.accumulate_gradients, []

    def spoiled(self: Engine, batches: Any, **more: Any) -> Losses:
        losses = accumulate(self, batches, **more)
        calls.append(None)
        if len(calls) == 2:
            self.buffers.gradients.full[0].fill_(float("nan"))
            return Losses(lm_loss=torch.full_like(losses.lm_loss, float("nan")))
        return losses

    monkeypatch.setattr(Engine, "accumulate_gradients", spoiled)


def run(folder: Path, **changed: str) -> tuple[int, list[dict[str, Any]]]:
    flags: dict[str, str | None] = {"--train-iters": "4", "--save": str(folder), "--log-interval": "4"}
    return pretrain.main(command_line(flags, **changed)), logged_lines(folder)


@pytest.mark.usefixtures("poisoned")
def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = run(tmp_path)
    assert code == 1
    assert len(lines) == 1
    assert "iteration 2: lm loss is nan" in capsys.readouterr().err


@pytest.mark.usefixtures("poisoned")
def test_without_the_check_the_iteration_is_skipped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = run(tmp_path, no_check_for_nan_in_loss_and_grad="")
    assert code == 0
    assert [line["skipped"] for line in lines] == [0, 1, 0, 0]
    assert lines[1]["learning_rate"] == lines[2]["learning_rate"]  # the schedule waits
    shown = capsys.readouterr().out
    assert "number of skipped iterations:   1 | number of nan iterations:   1 |" in shown
    assert "lm loss: NAN" not in shown


@pytest.mark.parametrize(
    ("changed", "steps", "words"),
    [
        ({"lr": "1e6", "initial_loss_scale": "1"}, "10 such steps in a row with a loss scale of 1; first on rank 0: ", None),
        ({"loss_scale": "1e30"}, "10 such steps in a row with a loss scale of 1e+30; first on rank 0: the backward pass of ",
         "use a smaller --loss-scale, or remove it for a dynamic scale; "),
    ],
)  # fmt: skip
def test_a_lost_run_of_fp16_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, str], steps: str, words: str | None
) -> None:
    code, lines = run(tmp_path, fp16="", train_iters="30", save_interval="1", **changed)
    assert code == 1
    assert len(lines) < 20
    shown = capsys.readouterr().err
    assert f"iteration {len(lines) + 1}: lm loss is " in shown
    assert f"the last of {steps}" in shown
    assert words is None or words in shown
    assert sum(path.is_dir() for path in tmp_path.glob("iter_*")) > 0
    assert not (tmp_path / f"iter_{len(lines) + 1:07}").exists()


def test_garbage_is_collected_when_it_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: collected.append(generation))
    garbage = GarbageCollection(is_manual=True, interval=3, around_evaluation=True)
    with garbage.manual_collection():
        assert not gc.isenabled()
        for iteration in range(1, 8):
            garbage.after_iteration(iteration)
        assert len(collected) == 1 + 2
        with garbage.evaluation():
            assert len(collected) == 4
    assert gc.isenabled()
    assert len(collected) == 5
    left_alone = GarbageCollection(is_manual=False, interval=1, around_evaluation=True)
    with left_alone.manual_collection(), left_alone.evaluation():
        left_alone.after_iteration(1)
        assert gc.isenabled()
    assert len(collected) == 5


def test_a_further_signal_asks_for_the_end() -> None:
    former = signal.getsignal(signal.SIGUSR2)
    stop = StopRequest(exit_interval=None, exit_duration_in_mins=None, exit_signal=signal.SIGUSR2)
    with stop.listening():
        os.kill(os.getpid(), signal.SIGUSR2)
    assert stop.signals.number == signal.SIGUSR2
    assert signal.getsignal(signal.SIGUSR2) == former
