"""--rerun-mode: a rejected step is computed again, here and on other devices, and the exit code says what was found."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from everyday import nightly, one_in
from run_helpers import command_line

import pretrain
from megatrain.training import losses
from megatrain.training.engine import Engine
from megatrain.training.faults import reruns
from megatrain.training.faults.reruns import FAILED_VALIDATION, RESUME_TO_DISAMBIGUATE

BAD_ITERATION = 5
Spoil = Callable[..., None]


def run(folder: Path, exit_code: int, **flags: str) -> None:
    same = {"--save": str(folder), "--load": str(folder), "--load-or-start": "", "--train-iters": "8"}
    same |= {"--save-interval": "8", "--rerun-mode": "validate_results"}
    assert pretrain.main(command_line(same, **flags)) == exit_code


def state_of(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((folder / "iter_0000008").glob("*.safetensors"))]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    run(tmp_path / "whole", 0)
    return tmp_path / "whole"


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """Return a function that makes the loss of the bad iteration NaN, or multiplies it, the next times that it is computed.

    Several factors are for one computation each; the last one stays.
    """
    accumulate, mean = Engine.accumulate_gradients, losses.mean_losses
    state: dict[str, float] = {"sample": -1, "times": 0}
    factors = [math.nan]

    def noted(engine: Engine, batches: object, *, first_sample: int = 0) -> object:
        state["sample"] = first_sample
        return accumulate(engine, batches, first_sample=first_sample)  # type: ignore[arg-type]

    def spoiled(sums: object) -> object:
        is_bad = state["sample"] == BAD_ITERATION - 1 and state["times"] > 0
        state["times"] -= is_bad
        factor = 1.0 if not is_bad else factors.pop(0) if len(factors) > 1 else factors[0]
        return mean(sums) * factor  # type: ignore[arg-type]

    def begin(times: int, *given: float) -> None:
        state["times"] = times
        factors[:] = given or [math.nan]

    monkeypatch.setattr(Engine, "accumulate_gradients", noted)
    monkeypatch.setattr(losses, "mean_losses", spoiled)
    return begin


@pytest.fixture
def move(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that gives this process another device."""
    return lambda name: monkeypatch.setattr(reruns, "device_name", lambda _: name)


EVERYWHERE = 1000


def test_a_transient_error_ends_the_run_with_17_and_the_next_start_equals_an_unbroken_run(
    tmp_path: Path, whole: Path, spoil: Spoil, move: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    move("h0 GPU-1")
    spoil(1)
    run(tmp_path / "run", FAILED_VALIDATION)
    shown = capsys.readouterr()
    assert "iteration 5: transient error" in shown.err
    assert "h0 GPU-1" in shown.err
    assert "committed iteration 4" in shown.out
    assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == FAILED_VALIDATION
    run(tmp_path / "run", 0)
    assert state_of(tmp_path / "run") == state_of(whole)


def test_a_persistent_error_is_found_on_another_device(
    tmp_path: Path, whole: Path, spoil: Spoil, move: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    move("h0 GPU-1")
    spoil(EVERYWHERE)
    run(tmp_path / "run", RESUME_TO_DISAMBIGUATE)
    assert "suspects: h0 GPU-1" in capsys.readouterr().err
    run(tmp_path / "run", RESUME_TO_DISAMBIGUATE)
    assert "iteration 5 must be computed on other devices: this run has h0 GPU-1" in capsys.readouterr().err
    move("h1 GPU-2")
    spoil(0)
    run(tmp_path / "run", FAILED_VALIDATION)
    errors = capsys.readouterr().err
    assert "iteration 5: persistent error" in errors
    assert "suspects: h0 GPU-1" in errors
    run(tmp_path / "run", 0)
    assert state_of(tmp_path / "run") == state_of(whole)


def test_a_result_that_other_devices_repeat_accuses_no_device(
    tmp_path: Path, spoil: Spoil, move: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    move("h0 GPU-1")
    spoil(EVERYWHERE)
    run(tmp_path / "run", RESUME_TO_DISAMBIGUATE)
    move("h1 GPU-2")
    capsys.readouterr()
    run(tmp_path / "run", FAILED_VALIDATION)
    errors = capsys.readouterr().err
    assert "iteration 5: the result is the same on other devices" in errors
    assert "--iterations-to-skip 4" in errors
    assert "GPU" not in errors


def test_the_step_may_be_passed_over_on_the_same_device(
    tmp_path: Path, spoil: Spoil, move: Callable[[str], None]
) -> None:
    move("h0 GPU-1")
    spoil(EVERYWHERE)
    run(tmp_path / "run", RESUME_TO_DISAMBIGUATE)
    run(tmp_path / "run", 0, iterations_to_skip="4")
    assert not (tmp_path / "run" / reruns.FILE_NAME).exists()


def test_a_damaged_record_is_ignored_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / reruns.FILE_NAME).write_text('{"iteration": "five"}')
    run(folder, 0)
    assert f"{reruns.FILE_NAME} is ignored" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "codes", "words"),
    [
        ("transient_error", [17, 0], "transient error"),
        ("persistent_error", [16, 17, 0], "persistent error"),
        ("correct_result", [16, 17], "the same on other devices"),
    ],
)
def test_injected_errors_are_diagnosed_as_what_they_are(
    tmp_path: Path,
    whole: Path,
    move: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
    kind: str,
    codes: list[int],
    words: str,
) -> None:
    errors = []
    for number, code in enumerate(codes):
        move(f"h{number} cpu")
        run(tmp_path / "run", code, error_injection_rate="5", error_injection_type=kind)
        errors.append(capsys.readouterr().err)
    assert words in errors[codes.index(17)]
    if codes[-1] == 0:
        assert state_of(tmp_path / "run") == state_of(whole)


def test_report_stats_computes_each_step_twice_and_changes_nothing(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "run", 0, rerun_mode="report_stats", log_interval="4")
    lines = re.findall(
        r"> 4 steps were computed twice; largest relative difference: (.*)", capsys.readouterr().out
    )
    assert lines == ["lm loss 0, grad norm 0"] * 2
    assert state_of(tmp_path / "run") == state_of(whole)


SPIKES = {"check_for_spiky_loss": ""}


@pytest.fixture
def early_spikes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.training.faults.responses.REFERENCE_STEPS", 2)


@pytest.mark.usefixtures("early_spikes")
@pytest.mark.parametrize("factors", [(1000.0, 1.0), nightly((1000.0, 2000.0)), nightly((1000.0, math.nan))])
def test_a_spike_with_other_values_the_second_time_is_a_transient_error(
    tmp_path: Path,
    whole: Path,
    spoil: Spoil,
    move: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
    factors: tuple[float, ...],
) -> None:
    move("h0 GPU-1")
    spoil(2, *factors)
    run(tmp_path / "run", FAILED_VALIDATION, **SPIKES)
    shown = capsys.readouterr()
    assert "iteration 5: transient error" in shown.err
    assert "h0 GPU-1" in shown.err
    assert "iteration 5: lm loss" in shown.out
    run(tmp_path / "run", 0, **SPIKES)
    assert state_of(tmp_path / "run") == state_of(whole)


@pytest.mark.usefixtures("early_spikes")
@pytest.mark.parametrize(("policy", "code"), one_in(3, [("stop", 1), ("warn", 0), ("skip", 0)]))
def test_a_spike_that_comes_again_accuses_no_device(
    tmp_path: Path, whole: Path, spoil: Spoil, capsys: pytest.CaptureFixture[str], policy: str, code: int
) -> None:
    spoil(EVERYWHERE, 1000.0)
    run(tmp_path / "run", code, **SPIKES, on_spike=policy)
    assert "iteration 5: computed again on the same devices, the spike is the same" in capsys.readouterr().out
    if policy == "warn":  # only the reported loss was changed, so that the update is that of the unbroken run
        assert state_of(tmp_path / "run") == state_of(whole)
    elif policy == "skip":
        assert state_of(tmp_path / "run") != state_of(whole)


@pytest.mark.usefixtures("early_spikes")
def test_a_spike_that_comes_again_changes_no_scale_twice(tmp_path: Path, spoil: Spoil) -> None:
    flags = {
        "fp8_format": "hybrid",
        "fp8_recipe": "delayed",
        "fp8_amax_history_len": "2",
        "hidden_size": "64",
    }
    run(tmp_path / "whole", 0, **flags)
    spoil(EVERYWHERE, 1000.0)
    run(tmp_path / "run", 0, **SPIKES, **flags)
    assert state_of(tmp_path / "run") == state_of(tmp_path / "whole")
    manifests = [
        json.loads((tmp_path / name / "iter_0000008" / "manifest.json").read_text())
        for name in ("whole", "run")
    ]
    assert manifests[0]["state"]["amax_history"] == manifests[1]["state"]["amax_history"] != {}
