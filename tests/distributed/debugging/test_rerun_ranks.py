"""A step that is rejected twice: all ranks end with 16, the suspect is the device of the culprit, and others decide."""

import json
import math
from pathlib import Path

import pytest
from forked_job import ForkedJob
from run_here import MODEL

from megatrain.training.engine import Engine
from megatrain.training.faults import reruns

CULPRIT, BAD_ITERATION, BATCH = 1, 5, 8


def poison_a_sample() -> None:
    """Make the loss mask of this rank's first sample NaN whenever the bad iteration is computed."""
    pass_infos = Engine.pass_infos

    def spoiled(engine, batches, *, first_sample):
        if first_sample == (BAD_ITERATION - 1) * BATCH:
            batches[0].loss_mask[0, 0] = math.nan
        return pass_infos(engine, batches, first_sample=first_sample)

    Engine.pass_infos = spoiled


@pytest.mark.nightly  # eight ranks, several times
def test_the_device_of_the_culprit_is_the_suspect_and_other_devices_decide(tmp_path: Path) -> None:
    save = tmp_path / "run"
    flags = [*MODEL, "--train-iters", "8", "--eval-iters", "0", "--no-eval-at-start", "--save", str(save)]
    flags += [
        "--load",
        str(save),
        "--load-or-start",
        "--save-interval",
        "2",
        "--rerun-mode",
        "validate_results",
    ]

    def job(host: str, *, is_faulty: bool) -> ForkedJob:
        def plant(rank: int) -> None:
            reruns.device_name = lambda _: f"{host} GPU-{rank}"
            if is_faulty and rank == CULPRIT:
                poison_a_sample()

        started = ForkedJob(flags, 2, tmp_path, plant)
        started.wait()
        return started

    first = job("h0", is_faulty=True)
    assert first.exit_codes == {0: 16, 1: 16}, first.output(0)
    assert json.loads((save / reruns.FILE_NAME).read_text()) == {
        "iteration": BAD_ITERATION,
        "devices": ["h0 GPU-1"],
    }
    second = job("h1", is_faulty=False)
    assert second.exit_codes == {0: 17, 1: 17}, second.output(0)
    assert "persistent error: the step is right on other devices; suspects: h0 GPU-1" in second.output(0)
    assert job("h1", is_faulty=False).exit_codes == {0: 0, 1: 0}
