"""`test_golden_training.py` in a process of its own, whose products have the same bits on every processor.

Routers of the recorded runs round to TF32, where the last bit of a product decides 1 part in 2,000.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_recorded_runs_have_the_recorded_digits(golden_text: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--golden={golden_text}"]
    done = subprocess.run(
        [*command, "tests/training/test_golden_training.py"],
        cwd=ROOT,
        env={**os.environ, "MKL_CBWR": "COMPATIBLE"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout[-2000:]
