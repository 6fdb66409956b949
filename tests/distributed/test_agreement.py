"""Ranks that were started differently are found before any process group exists."""

from pathlib import Path

import pytest
from forked_job import ForkedJob
from run_here import MODEL

from megatrain.training import agreement


def test_everything_that_differs_is_told_in_one_line(tmp_path: Path) -> None:
    def plant(rank):
        if rank == 2:
            parsed = agreement.resolve
            agreement.resolve = lambda request, facts: parsed(
                type(request)(
                    request.config.with_values({"optimizer.lr": 0.5, "training.seed": 7}), request.origins
                ),
                facts,
            )

    job = ForkedJob(MODEL, 4, tmp_path, plant)
    job.wait()
    assert job.exit_codes == {0: 2, 1: 2, 2: 2, 3: 2}
    assert job.output(2) == (
        "rank 2: error: --lr is 0.5 on this rank and 0.01 on rank 0; --seed is 7 on this rank and 1234 on rank 0\n"
        "  fix: start all ranks with the same command line and the same files\n"
    )
    assert job.output(1) == ""


@pytest.mark.parametrize(
    ("name", "other", "words"),
    [
        ("library_versions", lambda: {"torch": "1.0"}, "torch is 1.0 on this rank and "),
        ("library_versions", dict, "torch is missing on this rank and "),
        ("identity", lambda: {"megatrain's code": "0.1.0 (dirty)"}, "megatrain's code is 0.1.0 (dirty) on this rank and "),
    ],
)  # fmt: skip
def test_other_software_on_a_rank_is_found(tmp_path: Path, name, other, words) -> None:
    def plant(rank):
        if rank == 1:
            setattr(agreement, name, other)

    job = ForkedJob(MODEL, 2, tmp_path, plant)
    job.wait()
    assert job.exit_codes == {0: 2, 1: 2}
    assert words in job.output(1)
    assert job.output(1).count("\n") == 2
    assert job.output(1).endswith("  fix: give all hosts the same code and the same packages\n")
    assert "grid:" not in job.output(0)
