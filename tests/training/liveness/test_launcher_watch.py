"""A rank ends with its launcher, also if that is killed by SIGKILL; a process without a launcher continues."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from everyday import one_in
from run_helpers import ROOT, command_line, started, wait_for

from megatrain.config.environment import LaunchEnvironment
from megatrain.training.liveness import launcher_watch

LAUNCHER = """
import os, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
print(rank.pid, flush=True)
rank.wait()
"""
RANK = """
import time
from megatrain.config.environment import read_environment
from megatrain.training.liveness.launcher_watch import end_with_launcher
end_with_launcher(read_environment())
open({ready!r}, "w").write("ready\\n")
time.sleep({seconds})
open({ready!r}, "a").write("continues\\n")
"""
VARIABLES = {
    "torchrun": {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "run"},
    "srun": {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"},
    "hand": {"RANK": "0", "WORLD_SIZE": "2"},
    "none": {},
}
SECONDS_TO_END = 10.0


def is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie: the parent of an orphan may not collect its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def seconds_to_end(pids: list[int]) -> float:
    start = time.monotonic()
    while any(map(is_running, pids)) and time.monotonic() < start + 2 * SECONDS_TO_END:
        time.sleep(0.02)
    return time.monotonic() - start


@pytest.mark.parametrize(
    ("launcher", "is_stopped"),
    one_in(2, [("torchrun", True), ("none", False), ("hand", False), ("srun", False)]),
)
def test_a_rank_ends_with_its_launcher(tmp_path: Path, launcher: str, is_stopped: bool) -> None:
    """Also a rank under torchrun that is stopped."""
    ready, ends = tmp_path / "ready", launcher in ("torchrun", "srun")
    program = RANK.format(ready=str(ready), seconds=60 if ends else 1.5)
    environment = os.environ | VARIABLES[launcher] | {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "localhost"}
    with started(
        [sys.executable, "-c", LAUNCHER, program], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        rank = int(process.stdout.readline())
        wait_for(ready, lines=1)
        if is_stopped:
            os.kill(rank, signal.SIGSTOP)
    assert seconds_to_end([rank]) < SECONDS_TO_END
    assert ready.read_text() == "ready\n" + "continues\n" * (not ends)


def test_a_rank_whose_launcher_died_before_it_started_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class ExitError(Exception):
        pass

    def exits(_: object) -> None:
        raise ExitError

    monkeypatch.setattr(os, "getppid", lambda: 1)
    monkeypatch.setattr(launcher_watch, "_exit", exits)
    monkeypatch.setattr(
        launcher_watch, "_PR_SET_PDEATHSIG", 2
    )  # PR_GET_PDEATHSIG with a bad address does nothing
    monkeypatch.setattr(launcher_watch, "_is_python", lambda _: False)
    with pytest.raises(ExitError):
        launcher_watch.end_with_launcher(LaunchEnvironment(launcher="torchrun", world_size=2))


@pytest.mark.nightly
@pytest.mark.parametrize("seconds", [0.1, 1.0, 2.0, 3.0, 4.0, 6.0])
@pytest.mark.parametrize("layout", ["one agent", "the second host never comes"])
def test_ranks_end_with_torchrun_at_any_moment(tmp_path: Path, seconds: float, layout: str) -> None:
    """Also while they import torch, wait in the rendezvous, or train."""
    pids = tmp_path / "pids"
    script = tmp_path / "recorded.py"
    script.write_text(
        f"import os, sys\nopen({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
        "import pretrain\nsys.exit(pretrain.main(sys.argv[1:]))\n"
    )
    # One rank of three in a world of torchrun's: it waits for the others in the rendezvous.
    hosts = (
        ["--nproc-per-node", "2", "--standalone"]
        if layout == "one agent"
        else ["--nproc-per-node", "1", "--no-python", "env", "WORLD_SIZE=3", sys.executable]
    )
    words = [sys.executable, "-m", "torch.distributed.run", *hosts, str(script)]
    words += command_line({"--train-iters": "100000"})
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with started(words, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        wait_for(pids, lines=2 if layout == "one agent" else 1)
        time.sleep(seconds)
    ranks = [int(line) for line in pids.read_text().split()]
    assert seconds_to_end(ranks) < SECONDS_TO_END
