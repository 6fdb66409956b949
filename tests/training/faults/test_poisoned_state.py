"""State that is not finite never ends with exit code 0, and never becomes a checkpoint."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import command_line

import pretrain
from megatrain.checkpoint.find import newest_valid
from megatrain.training import evaluation
from megatrain.training.engine import Engine


def run(folder: Path, **changed: str) -> int:
    flags: dict[str, str | None] = {"--train-iters": "2", "--save": str(folder), "--load": str(folder)}
    return pretrain.main(command_line(flags, **changed))


def newest_iteration(folder: Path) -> int:
    newest = newest_valid(folder)
    return -1 if newest is None else newest.iteration


@pytest.mark.parametrize(
    ("kind", "value", "flags"),
    [
        ("exp_avg_sq", -1.0, {}),
        ("exp_avg", math.nan, {}),
        ("exp_avg_sq", math.inf, {}),
        ("exp_avg_sq", math.inf, {"on_save_failure": "warn"}),
        ("exp_avg", math.nan, {"on_save_failure": "warn", "async_save": ""}),
    ],
)
def test_a_poisoned_moment_is_not_committed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    value: float,
    flags: dict[str, str],
) -> None:
    """A failed write may be a warning; this may not: the next save would fail, too."""
    assert run(tmp_path) == 0
    begin_step = Engine.begin_step

    def spoiled(self: Engine, *args: Any, **more: Any) -> Any:
        self.optimizer.state(kind)[0][5] = value
        return begin_step(self, *args, **more)

    monkeypatch.setattr(Engine, "begin_step", spoiled)
    flags = {"train_iters": "4", "save_interval": "1", "override_opt_param_scheduler": "", **flags}
    assert run(tmp_path, **flags) == 1
    error = capsys.readouterr().err
    assert "saving iteration 3" in error
    assert f"{kind} of " in error or "weight of " in error
    assert "--ckpt-step" in error
    assert newest_iteration(tmp_path) == 2
    assert json.loads((tmp_path / "status.json").read_text())["exit_code"] == 1


@pytest.fixture
def nan_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "evaluate", lambda *_: torch.tensor([math.nan, 1.0], dtype=torch.float64))


@pytest.mark.usefixtures("nan_evaluations")
@pytest.mark.parametrize("eval_interval", ["1", "2"])
def test_an_evaluation_that_is_no_number_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], eval_interval: str
) -> None:
    for _ in range(2):  # the second start resumes from the checkpoint, and evaluates again
        assert run(tmp_path, eval_iters="1", eval_interval=eval_interval) == 1
        error = capsys.readouterr().err
        assert f"at iteration {eval_interval} is nan" in error
        assert "--ckpt-step" in error
        assert newest_iteration(tmp_path) == int(eval_interval)
    assert run(tmp_path, eval_iters="1", skip_train="") == 1


@pytest.mark.usefixtures("nan_evaluations")
def test_weights_that_spoil_an_evaluation_are_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begin_step = Engine.begin_step

    def spoiled(self: Engine, *args: Any, **more: Any) -> Any:
        pending = begin_step(self, *args, **more)
        self.optimizer.state("weight")[0][5] = math.nan
        return pending

    monkeypatch.setattr(Engine, "begin_step", spoiled)
    assert run(tmp_path, train_iters="1", eval_iters="1", eval_interval="1") == 1
    assert "weight of " in capsys.readouterr().err
    assert newest_iteration(tmp_path) == -1
