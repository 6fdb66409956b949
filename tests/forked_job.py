"""Run `pretrain.py`, or another program, in several processes that share only a launcher's variables; forked to save time."""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from free_ports import free_port

import pretrain
from megatrain.training.engine import Engine

Plant = Callable[[int], None]
"""A function called in each rank's process with its rank, before the run."""


def at_step(number, then):
    """Call `then` before step `number`."""
    begin, calls = Engine.begin_step, []

    def spoiled(engine, *arguments, **more):
        calls.append(None)
        if len(calls) == number:
            then()
        return begin(engine, *arguments, **more)

    Engine.begin_step = spoiled


class ForkedJob:
    """The processes of one run. The output of rank N is in `folder`/rank-N.txt.

    Args:
        flags: flags of all ranks.
        num_ranks: processes to start.
        folder: folder of their output.
        plant: function that plants a fault.
        more_flags: flags of single ranks.
        main: the program.
    """

    def __init__(
        self,
        flags: list[str],
        num_ranks: int,
        folder: Path,
        plant: Plant = lambda _: None,
        *,
        more_flags: Mapping[int, list[str]] = MappingProxyType({}),
        main: Callable[[list[str]], int] = pretrain.main,
    ) -> None:
        self.folder, self.main = folder, main
        self.exit_codes: dict[int, int] = {}
        """Exit codes by rank of the processes that have exited; -N means killed by signal N."""
        port = free_port()
        torch.set_num_threads(1)  # a process forked while torch's threads run hangs
        self.pids = []
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                self._run_rank(rank, num_ranks, port, [*flags, *more_flags.get(rank, [])], plant)
            self.pids.append(pid)

    def output(self, rank: int) -> str:
        return (self.folder / f"rank-{rank}.txt").read_text()

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], number)

    def is_running(self) -> bool:
        """Return True if any rank has not exited."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.exit_codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.exit_codes[rank] = os.waitstatus_to_exitcode(status)
        return len(self.exit_codes) < len(self.pids)

    def wait(self, *, to_end_seconds: float = 90.0) -> float:
        """Wait until all ranks have exited; return the seconds from the first exit to the last. Kill them if it takes too long."""
        deadline, first = time.monotonic() + to_end_seconds, None
        while self.is_running():
            now = time.monotonic()
            if first is None and self.exit_codes:
                first = now
            if now > deadline:
                late = [rank for rank in range(len(self.pids)) if rank not in self.exit_codes]
                for rank in late:
                    self.kill(rank)
                raise AssertionError(
                    f"ranks {late} did not end in {to_end_seconds} s; output of rank 0:\n{self.output(0)}"
                )
            time.sleep(0.02)
        return time.monotonic() - (first or time.monotonic())

    def wait_for_iteration(self, metrics: Path, iteration: int) -> None:
        """Wait until the run has logged that many iterations."""
        deadline = time.monotonic() + 90
        while not metrics.exists() or metrics.read_text().count("\n") < iteration:
            assert self.is_running(), self.output(0)
            assert time.monotonic() < deadline, self.output(0)
            time.sleep(0.02)

    def _run_rank(self, rank: int, num_ranks: int, port: int, flags: list[str], plant: Plant) -> None:
        """Run one rank in a child process."""
        exit_code = 99
        try:
            descriptor = os.open(self.folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_PORT": str(port)}
            plant(rank)
            exit_code = self.main(flags)
        finally:
            os._exit(exit_code)
