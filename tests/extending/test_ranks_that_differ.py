"""Functions of the user that give other values on one rank are one error before the first collective."""

from pathlib import Path

import pytest
from forked_job import ForkedJob
from user_files import MODEL

PLACE = "import dataclasses, os\nrank = int(os.environ['RANK'])\n"
LAYERS = """def f(model, layers):
    first, *others = layers
    wide = dataclasses.replace(first.mlp, ffn_hidden_size=128 + 64 * rank)
    return [first.with_part(wide), *others]
"""
SCHEDULE = "def f(samples, schedule): return 1e-3 * (1 + rank)\n"


@pytest.mark.parametrize(
    ("flag", "text", "words"),
    [
        ("--spec", LAYERS, "layer 0: mlp.ffn_hidden_size 192, on rank 0 128"),
        ("--lr-decay-style", SCHEDULE, "after 0 samples 0.002, on rank 0 0.001"),
    ],
)
def test_values_of_ranks_are_compared(tmp_path: Path, flag: str, text: str, words: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"{PLACE}{text}")
    flags = MODEL.replace("--lr-decay-style constant", "").split()
    job = ForkedJob([*flags, "--mock-data", flag, f"{file}:f"], 2, tmp_path)
    job.wait()
    assert set(job.exit_codes.values()) == {2}
    assert f"rank 1: error: {flag} {file}:f gives other values on this rank: {words}" in job.output(1)
    assert "not from the rank, the host or the time" in job.output(1)
    assert "Traceback" not in job.output(0) + job.output(1)
