"""Ranks that were started with different settings are reported before any process group exists."""

import os
from pathlib import Path

import pytest
from forked_job import ForkedJob
from run_here import MODEL

from megatrain.training.launch import agreement

TP = "--tensor-model-parallel-size"
SAME_COMMAND = "  fix: start all ranks with the same command line and the same files\n"


@pytest.mark.parametrize(
    ("num_ranks", "more_flags", "reported"),
    [
        (
            4,
            {2: ["--lr", "0.5", "--seed", "7"]},
            {2: "rank 2: error: --lr is 0.5 on this rank and 0.01 on rank 0; --seed is 7 on this rank and 1234 on rank 0\n"},
        ),
        (2, {1: [TP, "3"]}, {1: f"rank 1: error: {TP} is 3 on this rank and 1 on rank 0\n"}),
        (3, {0: [TP, "2"]}, {rank: f"rank {rank}: error: {TP} is 1 on this rank and 2 on rank 0\n" for rank in (1, 2)}),
        (2, {0: ["--kv-channels", "4"]}, {1: "rank 1: error: --kv-channels is not set on this rank and 4 on rank 0\n"}),
        (2, {0: [TP, "2"], 1: ["--bogus", "--lr", "x"]}, None),
    ],
)  # fmt: skip
def test_differences_are_reported_before_their_consequences(
    tmp_path: Path, num_ranks, more_flags, reported
) -> None:
    job = ForkedJob(MODEL, num_ranks, tmp_path, more_flags=more_flags)
    job.wait()
    assert job.exit_codes == dict.fromkeys(range(num_ranks), 2)
    assert "error" not in job.output(0)
    if reported is None:
        assert job.output(1).startswith("rank 1: error: 2 problems\n")
        assert "--bogus is not a flag\n" in job.output(1)
        return
    for rank in range(1, num_ranks):
        assert job.output(rank) == (f"{reported[rank]}{SAME_COMMAND}" if rank in reported else "")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reports_problems_of_its_own(tmp_path: Path, rank: int) -> None:
    job = ForkedJob(MODEL, 2, tmp_path, more_flags={rank: ["--config", str(tmp_path / "missing.yaml")]})
    job.wait()
    assert job.exit_codes == {0: 2, 1: 2}
    assert f"error: --config {tmp_path / 'missing.yaml'}" in job.output(rank)
    assert "fix:" not in job.output(1 - rank)


def test_a_variable_that_differs_is_reported(tmp_path: Path) -> None:
    def plant(rank):
        if rank == 1:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

    job = ForkedJob(MODEL, 2, tmp_path, plant)
    job.wait()
    assert job.exit_codes == {0: 2, 1: 2}
    assert "error: CUBLAS_WORKSPACE_CONFIG is :4096:8 on this rank and not set on rank 0\n" in job.output(1)


def test_rank_0_reports_problems_of_all_ranks_once(tmp_path: Path) -> None:
    job = ForkedJob([*MODEL, TP, "2"], 3, tmp_path)
    job.wait()
    assert job.exit_codes == dict.fromkeys(range(3), 2)
    assert "--tensor-model-parallel-size 2" in job.output(0).partition("error: ")[2]
    assert job.output(1) == job.output(2) == ""


@pytest.mark.parametrize(
    ("name", "other", "words"),
    [
        ("library_versions", lambda: {"torch": "1.0"}, "torch is 1.0 on this rank and "),
        ("library_versions", dict, "torch is missing on this rank and "),
        ("identity", lambda: {"megatrain's code": "0.1.0 (dirty)"}, "megatrain's code is 0.1.0 (dirty) on this rank and "),
    ],
)  # fmt: skip
def test_other_software_on_a_rank_is_reported(tmp_path: Path, name, other, words) -> None:
    def plant(rank):
        if rank == 1:
            setattr(agreement, name, other)

    job = ForkedJob(MODEL, 2, tmp_path, plant)
    job.wait()
    assert job.exit_codes == {0: 2, 1: 2}
    assert words in job.output(1)
    assert job.output(1).count("\n") == 2
    assert job.output(1).endswith("  fix: install the same code and packages on all hosts\n")
    assert "grid:" not in job.output(0)
