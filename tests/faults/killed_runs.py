"""Runs in forked processes, whose ranks or writer processes are killed, or whose disk fails, at a planned moment.

this process, with torch imported ── fork ──> rank 0 ── writer process
             └── launcher: waits; once a rank has failed, it kills the others
"""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import threading
import time
import traceback
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from unittest import mock

import numpy.random  # noqa: F401 (imported here once, and not by every rank)
import torch
import torch.distributed as dist
from run_here import make_trainer

from faults.case import require
from faults.killing_disk import KillingDisk, KillPlan
from megatrain.checkpoint import save
from megatrain.checkpoint.background import BackgroundWriter
from megatrain.config.errors import MegatrainError, describe
from megatrain.training import saving

_TESTS = Path(__file__).parents[1]
_WRITER = """
import sys
sys.path.insert(0, {tests!r})
from faults.killing_disk import serve_killing
serve_killing({plan!r}, {pid_file!r})
"""
_SECONDS_TO_EXIT = 10.0
"""Time for a writer process to end after its rank."""
_GRACE_SECONDS = 3.0
"""Time for ranks to end by themselves after one has failed."""
_KILL_SECONDS = 0.05
"""The same after one was killed."""
TRACEBACK = 70
"""Exit code of a rank with an unexpected exception."""


@dataclass(frozen=True)
class Ended:
    """A run that has ended."""

    exit_codes: list[int]
    """By rank; negative: killed by a signal."""
    output: str
    """Output of rank 0."""

    @property
    def acknowledged(self) -> set[int]:
        """The iterations that the log calls committed."""
        return {int(number) for number in re.findall(r"> committed iteration (\d+) to", self.output)}

    @property
    def resumed_from(self) -> int:
        """The iteration of the checkpoint that it loaded; 0: none."""
        found = re.search(r"> loaded \S+: iteration (\d+),", self.output)
        return int(found[1]) if found else 0

    @property
    def is_killed(self) -> bool:
        return -signal.SIGKILL in self.exit_codes or "killed by SIGKILL" in self.output


def small_data() -> AbstractContextManager[object]:
    """Let mock data have few sequences: the index of the usual number takes most of the time of a short run."""
    return mock.patch("megatrain.data.samples.mock.NUM_SEQUENCES", 300)


def run(flags: list[str], folder: Path, *, num_ranks: int = 1, plan: KillPlan | None = None) -> Ended:
    """Run `flags` until all ranks have ended. Logs are written to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.iterdir():
        left.unlink()
    torch.set_num_threads(1)  # a process forked while torch's threads run hangs
    pids: list[int] = []
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            _run_rank(rank, num_ranks, flags, folder, plan)
        with suppress(OSError):  # it was killed before this
            os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
    ended: dict[int, int] = {}
    try:
        _wait(pids, ended)
    finally:
        for pid in set(pids) - set(ended):
            os.kill(pid, signal.SIGKILL)
            ended[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    output = (folder / "rank-0.txt").read_text(errors="replace")
    for file in folder.glob("writer-*.pid"):
        _require_gone(int(file.read_text() or 0))
    result = Ended([ended[pid] for pid in pids], output)
    # The others lose their connections when one is killed; `pretrain.py` reports that in place of their exceptions.
    is_traceback = TRACEBACK in result.exit_codes and not result.is_killed
    require(not is_traceback, f"a traceback: {output[-1500:]}")
    return result


def _wait(pids: list[int], ended: dict[int, int]) -> None:
    """Collect exit codes; return early if ranks are left some time after one was killed or has failed."""
    deadline = float("inf")
    while len(ended) < len(pids) and time.monotonic() < deadline:
        for pid in set(pids) - set(ended):
            gone, status = os.waitpid(pid, os.WNOHANG)
            if gone:
                ended[pid] = code = os.waitstatus_to_exitcode(status)
                if code:
                    grace = _GRACE_SECONDS if code > 0 else _KILL_SECONDS
                    deadline = min(deadline, time.monotonic() + grace)
        time.sleep(0.002)


def _require_gone(pid: int) -> None:
    """Check that a writer process ends with its rank."""
    deadline = time.monotonic() + _SECONDS_TO_EXIT
    while pid and (state := _state(pid)) not in ("", "Z", "X"):
        require(time.monotonic() < deadline, f"the writer process {pid} outlives its rank (state {state})")
        time.sleep(0.005)


def _state(pid: int) -> str:
    """Return the letter of a process's state; empty if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _run_rank(rank: int, num_ranks: int, flags: list[str], folder: Path, plan: KillPlan | None) -> None:
    """Run one rank in a child process."""
    code, parent = TRACEBACK, os.getpgid(os.getppid())
    try:
        while os.getpgrp() == parent:  # the launcher makes the job's group
            time.sleep(0.0005)
        handle = os.open(folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        own = plan if plan is not None and plan.rank == rank else None
        code = _train(rank, num_ranks, flags, folder, own)
    except MegatrainError as error:
        print(describe(error))
        code = error.exit_code
    except BaseException:  # noqa: BLE001 (the launcher reports it)
        traceback.print_exc(file=sys.stdout)
    finally:
        sys.stdout.flush()
        os._exit(code)


def _train(rank: int, num_ranks: int, flags: list[str], folder: Path, plan: KillPlan | None) -> int:
    pid_file = folder / f"writer-{rank}.pid"

    def kill(target: str) -> None:
        if target == "job":
            os.killpg(0, signal.SIGKILL)
        elif target == "rank":
            os.kill(os.getpid(), signal.SIGKILL)
        elif pid_file.exists() and (pid := int(pid_file.read_text() or 0)):
            os.kill(pid, signal.SIGKILL)

    if plan is not None and plan.iteration == 0:
        timer = threading.Timer(plan.delay_seconds, lambda: [kill(target) for target in plan.targets])
        timer.daemon = True
        timer.start()
    own = plan if plan is not None and not plan.in_writer and plan.iteration else None
    text = plan.to_text() if plan is not None and plan.in_writer else ""
    program = _WRITER.format(tests=str(_TESTS), plan=text, pid_file=str(pid_file))
    make_disk = functools.partial(KillingDisk, own, kill, [0])
    if num_ranks > 1:
        store = dist.FileStore(str(folder / "store"), num_ranks)
        minute = timedelta(minutes=1)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=minute)
    with (
        small_data(),
        mock.patch.object(save, "Disk", make_disk),
        mock.patch.object(saving, "Disk", make_disk),
        mock.patch.object(saving, "BackgroundWriter", functools.partial(BackgroundWriter, program=program)),
    ):
        trainer = make_trainer(rank, num_ranks, flags)
        trainer.resume()
        return trainer.train()
