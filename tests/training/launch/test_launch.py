"""Launches: by torchrun, stops, and the files of a stopped run."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from forked_job import ForkedJob
from metrics_files import logged_lines, logged_losses
from run_helpers import ROOT, command_line, wait_for

import pretrain
from megatrain.training.logging.metrics_file import MetricsFile

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def test_two_ranks_train_and_leave_status_and_configuration(tmp_path: Path) -> None:
    save = tmp_path / "run"
    flags = command_line({"--save": str(save), "--load": str(save), "--global-batch-size": "2"})
    words = [*TORCHRUN, "pretrain.py", *flags]
    ended = subprocess.run(words, check=False, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    for reason in ("the target is reached", "the target was reached before"):
        status = json.loads((save / "status.json").read_text())
        assert (status["exit_code"], status["reason"], status["iteration"]) == (0, reason, 2)
        assert pretrain.main(flags) == 0
    assert len((save / "metrics.jsonl").read_text().splitlines()) == 2


def test_sigterm_saves_and_the_same_command_resumes(tmp_path: Path) -> None:
    save = tmp_path / "run"
    flags: dict[str, str | None] = {"--save": str(save), "--load": str(save), "--train-iters": "100000"}
    job = ForkedJob(command_line(flags), 1, tmp_path)
    job.wait_for_iteration(save / "metrics.jsonl", 3)
    job.kill(0, signal.SIGTERM)
    job.kill(0, signal.SIGTERM)  # a scheduler and a launcher both send it: that counts once
    job.wait()
    assert job.exit_codes == {0: 75}
    assert "signal SIGTERM" in job.output(0)
    status = json.loads((save / "status.json").read_text())
    assert (status["exit_code"], status["reason"]) == (75, "signal SIGTERM")
    saved = status["iteration"]
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == str(saved)
    again = {**flags, "--exit-interval": "1"}
    assert pretrain.main(command_line(again)) == 75
    iterations = [json.loads(line)["iteration"] for line in (save / "metrics.jsonl").read_text().splitlines()]
    assert iterations == list(range(1, saved + 2))


def test_a_stop_in_an_evaluation_is_prompt_and_the_evaluation_is_made_up_for(tmp_path: Path) -> None:
    save = tmp_path / "run"
    flags: dict[str, str | None] = {
        "--save": str(save), "--load": str(save), "--train-iters": "4", "--eval-interval": "2", "--eval-iters": "600",
    }  # fmt: skip

    def stop() -> None:
        wait_for(save / "metrics.jsonl", lines=2)
        os.kill(os.getpid(), signal.SIGTERM)

    stopping = threading.Thread(target=stop)
    stopping.start()
    assert pretrain.main(command_line(flags)) == 75
    stopping.join()
    assert json.loads((save / "status.json").read_text())["iteration"] == 2
    assert len((save / "metrics.jsonl").read_text().splitlines()) == 2
    assert pretrain.main(command_line({**flags, "--eval-iters": "2", "--exit-interval": "3"})) == 75
    assert [(line["iteration"], "validation" in line) for line in logged_lines(save)] == [
        (1, False), (2, False), (2, True), (3, False),
    ]  # fmt: skip


def test_a_crash_leaves_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = tmp_path / "run"

    def poisoned(sums: torch.Tensor) -> torch.Tensor:
        return torch.full_like(sums[:-1], float("nan"))

    monkeypatch.setattr("megatrain.training.losses.mean_losses", poisoned)
    assert pretrain.main(command_line({"--save": str(save)})) == 1
    status = json.loads((save / "status.json").read_text())
    assert status["exit_code"] == 1
    assert "iteration 1: lm loss is nan" in status["reason"]
    assert not list(save.glob("iter_*"))


def test_a_fresh_run_into_a_used_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save: dict[str, str | None] = {"--save": str(tmp_path / "run")}
    assert pretrain.main(command_line(save)) == 0
    assert pretrain.main(command_line({**save, "--lr": "1e-4"})) == 2
    assert f"--save {save['--save']} has checkpoints up to iteration 2" in capsys.readouterr().err


def test_a_metrics_file_that_is_something_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes\n")
    assert pretrain.main(command_line({"--metrics-file": str(notes)})) == 2
    assert "would be lost" in capsys.readouterr().err
    assert notes.read_text() == "my notes\n"


@pytest.mark.parametrize("torn", ["", '{"iteration": 3, "lm_', "[1]\n"])
def test_metrics_are_cut_after_the_iteration_that_a_run_resumes_from(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"iteration": {n}}}\n' for n in (1, 2, 3)) + torn)
    written = MetricsFile(path, resumed_iteration=2)
    written.write({"iteration": 3, "lm_loss": float("nan")})
    written.close()
    assert path.read_text() == '{"iteration": 1}\n{"iteration": 2}\n{"iteration": 3, "lm_loss": null}\n'


def test_the_saved_configuration_reproduces_the_run(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert pretrain.main(command_line({"--save": str(first)})) == 0
    assert pretrain.main(["--config", str(first / "config.yaml"), "--save", str(second)]) == 0
    assert logged_losses(first) == logged_losses(second)


@pytest.mark.parametrize(
    ("module", "name", "end"),
    [
        ("yaml", "SIGINT", (130, "interrupted\n")),
        ("torch", "SIGINT", (130, "interrupted\n")),
        ("torch", "SIGTERM", (75, "stopped by SIGTERM\n")),
        ("torch", "SIGHUP", (75, "stopped by SIGHUP\n")),
    ],
)
def test_a_signal_while_the_program_is_imported_ends_it(
    module: str, name: str, end: tuple[int, str], tmp_path: Path
) -> None:
    (tmp_path / f"{module}.py").write_text(  # swallows exceptions, as libraries do
        f"import os, signal, time\ntry:\n    os.kill(os.getpid(), signal.{name})\n    time.sleep(60)\n"
        "except BaseException:\n    pass\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    words = ["env", "--default-signal=HUP", sys.executable, "pretrain.py", *command_line({})]
    ended = subprocess.run(
        words, cwd=ROOT, env=environment, check=False, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == end


def test_an_interrupt_of_the_start_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megatrain.training.launch.agreement.gather_facts", interrupted)
    assert pretrain.main(command_line({})) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_refused_start_keeps_the_status_of_the_run(tmp_path: Path) -> None:
    run: dict[str, str | None] = {"--save": str(tmp_path / "run"), "--load": str(tmp_path / "run")}
    assert pretrain.main(command_line(run)) == 0
    before = json.loads((tmp_path / "run" / "status.json").read_text())
    assert pretrain.main(command_line({**run, "--seed": "5"})) == 2
    after = json.loads((tmp_path / "run" / "status.json").read_text())
    refused = after.pop("refused_start")
    assert after == before
    assert refused["exit_code"] == 2
    assert "--seed" in refused["reason"]
    assert pretrain.main(command_line(run)) == 0
    assert "refused_start" not in json.loads((tmp_path / "run" / "status.json").read_text())


def test_a_start_that_is_refused_first_is_the_status(tmp_path: Path) -> None:
    assert pretrain.main(command_line({"--save": str(tmp_path), "--lr": "fast"})) == 2
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["exit_code"], status["iteration"]) == (2, None)
    assert "--lr" in status["reason"]


@pytest.mark.parametrize(
    "missing", [{"--tokenizer-type": "HuggingFaceTokenizer", "--tokenizer-model": "/nosuch.json"},
                {"--mock-data": None, "--data-path": "/nosuch"}]
)  # fmt: skip
def test_a_missing_input_does_not_hide_that_the_run_continues(
    missing: dict[str, str | None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run: dict[str, str | None] = {"--save": str(tmp_path / "run"), "--load": str(tmp_path / "run")}
    assert pretrain.main(command_line(run)) == 0
    capsys.readouterr()
    assert pretrain.main(command_line({**run, **missing})) == 2
    errors = capsys.readouterr().err
    assert errors.count("fix:") == 1
    assert "/nosuch" in errors
    assert pretrain.main(command_line({**run, **missing, "--finetune": "", "--load": "/elsewhere"})) == 2
    assert "which this run does not continue" in capsys.readouterr().err
