"""--on-nan and --on-spike: stop, skip or rewind; a rewound run ends as one that passes over the bad iteration."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from metrics_files import logged_steps
from run_helpers import command_line

import pretrain
from megatrain.training import losses
from megatrain.training.engine import Engine
from megatrain.training.faults import responses

BAD_ITERATION = 5


def run(folder: Path, exit_code: int, **flags: str) -> None:
    same: dict[str, str | None] = {"--save": str(folder), "--train-iters": "8", "--save-interval": "2"}
    assert pretrain.main(command_line(same, **flags)) == exit_code


def losses_of(folder: Path) -> dict[int, Any]:
    return {line["iteration"]: line["lm_loss"] for line in logged_steps(folder)}


def weights_of(folder: Path) -> list[bytes]:
    files = sorted((folder / "iter_0000008").glob("*.safetensors"))
    assert files
    return [path.read_bytes() for path in files]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A run that never computes the bad iteration."""
    run(tmp_path / "whole", 0, iterations_to_skip=str(BAD_ITERATION - 1))
    return tmp_path / "whole"


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Multiply the loss of an iteration, known by its samples, by a factor."""
    begin, mean, samples = Engine.begin_step, losses.mean_losses, []
    monkeypatch.setattr(responses, "REFERENCE_STEPS", 3)

    def begin_step(engine: Engine, *arguments: Any, **more: Any) -> Any:
        samples.append(more["first_sample"])
        return begin(engine, *arguments, **more)

    def plant(factor: float) -> None:
        def spoiled(sums: Any) -> Any:
            return mean(sums) * (factor if samples[-1] == BAD_ITERATION - 1 else 1.0)

        monkeypatch.setattr(Engine, "begin_step", begin_step)
        monkeypatch.setattr(losses, "mean_losses", spoiled)

    return plant


@pytest.mark.parametrize("kind", ["nan", "spike"])
def test_a_rewound_run_equals_one_without_the_bad_iteration(
    tmp_path: Path, whole: Path, spoil: Callable[[float], None], capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    spoil(math.nan if kind == "nan" else 100.0)
    flags = {"on_nan": "rewind 2"} if kind == "nan" else {"on_spike": "rewind 2", "check_for_spiky_loss": ""}
    run(tmp_path / "run", 0, **flags)
    output = capsys.readouterr().out
    assert "iter_0000002; iteration 5 will be skipped" in output
    assert "> iteration 5 is skipped (rewind)" in output
    assert losses_of(tmp_path / "run") == losses_of(whole)
    assert weights_of(tmp_path / "run") == weights_of(whole)
    (line,) = (json.loads(text) for text in (tmp_path / "run" / "bad_steps.jsonl").read_text().splitlines())
    assert (line["kind"], line["iteration"], line["action"], line["first_sample"]) == (kind, 5, "rewind 2", 4)
    assert [one["sample"] for one in line["documents"]][:1] == [4]


@pytest.mark.parametrize("kind", ["nan", "spike"])
def test_a_skipped_step_updates_nothing(
    tmp_path: Path, whole: Path, spoil: Callable[[float], None], kind: str
) -> None:
    spoil(math.nan if kind == "nan" else 100.0)
    flags = {"on_nan": "skip"} if kind == "nan" else {"on_spike": "skip", "check_for_spiky_loss": ""}
    run(tmp_path / "run", 0, **flags)
    found, expected = losses_of(tmp_path / "run"), losses_of(whole)
    assert found.keys() - expected.keys() == {BAD_ITERATION}
    assert {number: found[number] for number in expected} == expected
    assert weights_of(tmp_path / "run") == weights_of(whole)
    assert json.loads((tmp_path / "run" / "bad_steps.jsonl").read_text())["action"] == "skip"


def test_a_spike_stops_the_run(
    tmp_path: Path, spoil: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(100.0)
    run(tmp_path / "run", 1, on_spike="stop", check_for_spiky_loss="")
    errors = capsys.readouterr().err
    assert "iteration 5: lm loss" in errors
    assert "--iterations-to-skip 4" in errors


def test_a_run_without_an_old_checkpoint_stops(
    tmp_path: Path, spoil: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(math.nan)
    run(tmp_path / "run", 1, on_nan="rewind 4")
    shown = capsys.readouterr()
    assert "> cannot rewind: no checkpoint of iteration 1 or earlier" in shown.out
    assert "iteration 5: lm loss is nan" in shown.err
