"""What stops one rank stops all: a signal before the first iteration, and a console that is closed."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from forked_job import ForkedJob, at_step
from run_here import MODEL

from megatrain.training.trainer import Trainer

FOREVER = [*MODEL, "--train-iters", "100000", "--eval-iters", "0", "--no-eval-at-start"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_of_one_rank_before_the_first_iteration_ends_all(tmp_path: Path, number: int) -> None:
    save = tmp_path / "run"

    def plant(rank):
        def blocks(*_):
            if rank == 1:
                os.kill(os.getpid(), number)
            time.sleep(60)

        Trainer.resume = blocks

    job = ForkedJob([*FOREVER, "--save", str(save)], 2, tmp_path, plant)
    assert job.wait() < 15
    code, text = (130, "interrupted\n") if number == signal.SIGINT else (75, "stopped by SIGTERM\n")
    assert job.exit_codes == {0: code, 1: code}
    assert job.output(1).endswith(text)
    assert "Traceback" not in job.output(0) + job.output(1)
    assert not (save / "run.lock").exists()


def test_a_closed_console_of_rank_0_saves_and_stops_all(tmp_path: Path) -> None:
    save = tmp_path / "run"

    def close_stdout():
        receiver, sender = os.pipe()
        os.dup2(sender, 1)
        os.close(receiver)

    job = ForkedJob(
        [*FOREVER, "--save", str(save), "--log-interval", "1"],
        2,
        tmp_path,
        lambda rank: at_step(3, close_stdout) if rank == 0 else None,
    )
    assert job.wait() < 15
    assert job.exit_codes == {0: 75, 1: 75}
    status = json.loads((save / "status.json").read_text())
    assert status["reason"] == "standard output cannot be written"
    assert (save / f"iter_{status['iteration']:07d}").is_dir()
    assert "Traceback" not in job.output(0) + job.output(1)
