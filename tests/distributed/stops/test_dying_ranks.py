"""A rank that dies stops the others within 30 seconds; its traceback is printed last, and all ranks exit with its code."""

import ctypes
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from everyday import one_in
from forked_job import ForkedJob, at_step
from run_here import MODEL, folder_flags

from megatrain.checkpoint.find import find_checkpoints, newest_valid
from megatrain.checkpoint.reader import verify
from megatrain.config.errors import MegatrainError
from megatrain.data.samples.loader import BatchLoader

FOREVER = [*MODEL, "--train-iters", "100000", "--eval-iters", "0", "--no-eval-at-start"]


def fails():
    raise ValueError("planted in the step")


def exits():
    sys.exit(7)


def is_interrupted():
    raise KeyboardInterrupt


def leaves():
    os._exit(5)


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def raises_user_error():
    raise MegatrainError("this rank's disk is full", fix="free some space")


@pytest.mark.parametrize("culprit", one_in(2, [2, 0]))
@pytest.mark.parametrize(
    ("dies", "exit_codes", "words"),
    [
        (fails, (1, 1), "ValueError: planted in the step\n"),
        pytest.param(exits, (7, 7), "SystemExit: 7\n", marks=pytest.mark.nightly),
        (is_interrupted, (130, 130), "interrupted\n"),
        (raises_user_error, (1, 1), "this rank's disk is full\n  fix: free some space\n"),
        pytest.param(leaves, (5, 1), None, marks=pytest.mark.nightly),
        (is_killed, (-9, 1), None),
    ],
)
def test_one_rank_stops_all_ranks(tmp_path: Path, culprit, dies, exit_codes, words) -> None:
    save = tmp_path / "run"

    def plant(rank):
        if rank == culprit:
            at_step(3, dies)

    job = ForkedJob(
        [*FOREVER, "--save", str(save), "--pipeline-model-parallel-size", "2"], 4, tmp_path, plant
    )
    assert job.wait() < 15
    own, others = exit_codes
    assert job.exit_codes == {rank: own if rank == culprit else others for rank in range(4)}
    if words is not None:
        assert job.output(culprit).endswith(words)
    reporter = 1 if culprit == 0 else 0
    for rank in range(4):
        printed = (
            job.output(rank).partition("iteration        1/")[2].splitlines()[1:]
            if rank == 0
            else job.output(rank).splitlines()
        )
        if rank != culprit:
            printed = [
                line for line in printed if not line.startswith("> the first iteration took")
            ]  # on a busy machine
            assert len(printed) == (1 if words is None and rank == reporter else 0), printed
    if words is None:
        assert f"rank {culprit} of 4 on" in job.output(reporter)
        assert "died without an error" in job.output(reporter)
    status = json.loads((save / "status.json").read_text())
    if words is not None or culprit != 0:
        assert status["exit_code"] == others
    if culprit != 0:
        assert status["reason"].startswith(f"rank {culprit} of 4 on")


def test_a_read_error_in_a_loader_thread_stops_all_ranks(tmp_path: Path) -> None:
    def plant(rank):
        fill = BatchLoader._fill

        def broken(loader, block, step, number):
            if rank == 1 and step.consumed_samples >= 16:
                raise OSError(5, "Input/output error", "corpus.bin")
            fill(loader, block, step, number)

        BatchLoader._fill = broken

    job = ForkedJob(FOREVER, 2, tmp_path, plant)
    assert job.wait() < 15
    assert job.exit_codes == {0: 1, 1: 1}
    assert job.output(1).endswith("OSError: [Errno 5] Input/output error: 'corpus.bin'\n")


@pytest.mark.parametrize("seed", one_in(3, range(6)))
def test_killed_at_any_moment_all_exit_and_checkpoints_are_intact(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    culprit, save = chance.randrange(2), tmp_path / "run"
    job = ForkedJob([*FOREVER, *folder_flags(save), "--save-interval", "1"], 2, tmp_path)
    if seed:
        job.wait_for_iteration(save / "metrics.jsonl", 2)  # after the checkpoint of iteration 1
    time.sleep(chance.uniform(0, 1.0))
    job.kill(culprit)
    assert job.wait(to_end_seconds=30) < 15
    assert job.exit_codes == {culprit: -9, 1 - culprit: 1}
    if seed:
        newest = newest_valid(save)
        assert newest is not None
        assert verify(newest.path) == []
        assert all(candidate.problem is None for candidate in find_checkpoints(save))


@pytest.mark.nightly
def test_a_long_pause_is_not_a_failure(tmp_path: Path) -> None:
    """One rank holds the GIL for six seconds, the other is stopped by a signal for six seconds."""

    def holds_the_lock():
        ctypes.PyDLL(None).sleep(6)

    def stops():
        waker = os.fork()
        if waker == 0:
            time.sleep(6)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)

    def plant(rank):
        at_step(3, holds_the_lock if rank == 0 else stops)

    job = ForkedJob([*FOREVER, "--exit-interval", "6"], 2, tmp_path, plant)
    job.wait()
    assert job.exit_codes == {0: 75, 1: 75}
    assert job.output(1) == ""
