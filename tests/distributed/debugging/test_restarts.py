"""torchrun --max-restarts: ranks that are killed are started again, and the run ends equal to an unbroken one."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from run_here import MODEL, metrics

from megatrain.checkpoint.find import find_checkpoints

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


KILLED_AT_RANDOM = """
import os, random, signal, sys, threading
import pretrain
from megatrain.storage.disk import Disk

chance = random.Random(int(sys.argv[1]))
left = [chance.randrange(1, 25)]

def counted(name):
    operation = getattr(Disk, name)

    def call(disk, *arguments):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid() if chance.random() < 0.5 else os.getppid(), signal.SIGKILL)
        return operation(disk, *arguments)

    return call

if int(os.environ["RANK"]) == (0 if "--async-save" in sys.argv else int(sys.argv[1]) % 2):
    for name in ("make_folder", "create", "write", "sync", "sync_folder", "rename"):
        setattr(Disk, name, counted(name))
sys.exit(pretrain.main(sys.argv[2:]))
"""
"""A rank, or torchrun itself, is killed before a file operation of a save; the first argument is the seed. In the background, rank 1
has none: its writer process writes."""


def torchrun(program: str, save: Path, *flags: str, options: Sequence[str] = ()) -> CompletedProcess[str]:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    words += [*program.split(), *MODEL, "--train-iters", "8", "--eval-iters", "0", "--no-eval-at-start"]
    words += ["--save", str(save), "--load", str(save), "--save-interval", "2", *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.nightly
def test_killed_ranks_are_started_again(tmp_path: Path) -> None:
    script = tmp_path / "killed_twice.py"
    script.write_text(KILLED_TWICE)
    unbroken = torchrun("pretrain.py", tmp_path / "unbroken")
    assert unbroken.returncode == 0, unbroken.stderr
    ended = torchrun(str(script), tmp_path / "killed", options=["--max-restarts", "2"])
    assert ended.returncode == 0, ended.stderr
    assert re.findall(r"> loaded \S+: iteration (\d)", ended.stdout) == ["2", "4"]
    assert ended.stderr.count("died without an error") == 2
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "unbroken")


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [(), ("--async-save",)], ids=["waiting", "in background"])
def test_runs_of_torchrun_that_are_killed_during_saves_resume_to_the_bit(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Start after start is killed; the iterations that the log called committed are never lost."""
    script, save = tmp_path / "killed_at_random.py", tmp_path / "killed"
    script.write_text(KILLED_AT_RANDOM)
    assert torchrun("pretrain.py", tmp_path / "unbroken", *flags).returncode == 0
    committed, num_killed = 0, 0
    for seed in range(3):
        ended = torchrun(f"{script} {seed}", save, *flags)
        num_killed += ended.returncode != 0
        started = "> started in" in ended.stdout
        assert not started or loaded(ended.stdout) == committed, ended.stdout
        committed = max(committed, *map(int, re.findall(r"> committed iteration (\d+) to", ended.stdout)), 0)
        newest = max((one.iteration for one in find_checkpoints(save)), default=0)
        assert newest >= committed
        committed = newest
    assert num_killed >= 2
    ended = torchrun("pretrain.py", save, *flags)
    assert ended.returncode == 0, ended.stderr
    assert loaded(ended.stdout) == committed
    assert metrics(save) == metrics(tmp_path / "unbroken")


def loaded(output: str) -> int:
    """Return the iteration of the checkpoint that a run loaded; 0: none."""
    return int((re.findall(r"> loaded \S+: iteration (\d+)", output) or ["0"])[0])
