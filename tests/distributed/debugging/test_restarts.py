"""torchrun --max-restarts: ranks that are killed are started again, and the run ends equal to an unbroken one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from run_here import MODEL, metrics

ROOT = Path(__file__).parents[3]
KILLED_TWICE = """
import os, signal, sys
import pretrain
from megatrain.training.engine import Engine
begin, restarts = Engine.begin_step, int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def spoiled(engine, *arguments, **more):
    if more["first_sample"] == 8 * (3 + 2 * restarts) and restarts < 2 and int(os.environ["RANK"]) == restarts:
        os.kill(os.getpid(), signal.SIGKILL)
    return begin(engine, *arguments, **more)

Engine.begin_step = spoiled
sys.exit(pretrain.main(sys.argv[1:]))
"""


@pytest.mark.nightly
def test_killed_ranks_are_started_again(tmp_path: Path) -> None:
    script = tmp_path / "killed_twice.py"
    script.write_text(KILLED_TWICE)

    def run(program: str, save: Path, *options: str) -> subprocess.CompletedProcess[str]:
        words = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            *options,
        ]
        words += [program, *MODEL, "--train-iters", "8", "--eval-iters", "0", "--no-eval-at-start"]
        words += ["--save", str(save), "--load", str(save), "--save-interval", "2"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(
            words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300
        )

    unbroken = run("pretrain.py", tmp_path / "unbroken")
    assert unbroken.returncode == 0, unbroken.stderr
    ended = run(str(script), tmp_path / "killed", "--max-restarts", "2")
    assert ended.returncode == 0, ended.stderr
    assert re.findall(r"> loaded \S+: iteration (\d)", ended.stdout) == ["2", "4"]
    assert ended.stderr.count("died without an error") == 2
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "unbroken")
