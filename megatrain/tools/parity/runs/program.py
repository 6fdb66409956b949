"""Run the real program on several ranks, which are forked: a start takes milliseconds instead of seconds.

flags ─> one forked process per rank: parse ─> joined_ranks ─> Trainer ─> exit code      output of rank N: FOLDER/rank-N.txt

A forked process is the program in all but its import: its ranks join at a port, agree on a plan and watch one another.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # meta tensors of a dry run import it, which takes seconds; once, before the ranks are forked

from megatrain.config import parse
from megatrain.config.environment import set_unless_given
from megatrain.tools.parity.measure import start_lion
from megatrain.training.launch.ranks import joined_ranks, report_errors
from megatrain.training.planning.dry_run_output import print_dry_run
from megatrain.training.trainer import Trainer

Patch = Callable[[], AbstractContextManager[Any]]
"""A change of the program in all ranks."""
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Ended:
    """A run that has ended."""

    exit_codes: tuple[int, ...]
    """By rank; -N: killed by signal N."""
    outputs: tuple[str, ...]
    """By rank."""
    is_late: bool = False
    """It was killed at the time limit."""

    @property
    def exit_code(self) -> int:
        """The exit code that all ranks agree on; 1 if they do not."""
        return self.exit_codes[0] if len(set(self.exit_codes)) == 1 else 1


def run_program(
    flags: Sequence[str],
    num_ranks: int,
    folder: Path,
    *,
    patches: Sequence[Patch] = (),
    timeout_seconds: float = 120.0,
    world_size: int | None = None,
) -> Ended:
    """Run `pretrain.py` with these flags on forked ranks of this host, and wait for its end.

    Args:
        flags: of all ranks.
        num_ranks: processes to start.
        folder: folder of their output.
        patches: entered in each rank before the run.
        timeout_seconds: time after which they are killed.
        world_size: ranks of the run, if a dry run uses fewer processes; None: `num_ranks`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    torch.set_num_threads(1)  # a process forked from one with torch's threads hangs
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            _run_rank(flags, rank, world_size or num_ranks, port, _output(folder, rank), patches)
        pids.append(pid)
    codes, is_late = _wait(pids, timeout_seconds)
    texts = tuple(
        _output(folder, rank).read_text(encoding="utf-8", errors="replace") for rank in range(num_ranks)
    )
    return Ended(codes, texts, is_late)


def _output(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.txt"


def _wait(pids: Sequence[int], timeout_seconds: float) -> tuple[tuple[int, ...], bool]:
    """Return the exit codes, and whether the processes had to be killed."""
    deadline, codes = time.monotonic() + timeout_seconds, dict[int, int]()
    is_late = False
    while len(codes) < len(pids):
        for pid in pids:
            ended, status = os.waitpid(pid, os.WNOHANG) if pid not in codes else (0, 0)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if not is_late and time.monotonic() > deadline:
            is_late = True
            for pid in set(pids) - codes.keys():
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    return tuple(codes[pid] for pid in pids), is_late


def _run_rank(
    flags: Sequence[str], rank: int, world_size: int, port: int, output: Path, patches: Sequence[Patch]
) -> None:
    """Run one rank in a forked process, which it ends."""
    exit_code = 99
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        variables = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in variables.items() if world_size > 1 else ():
            set_unless_given(name, str(value))
        for patch in patches:
            patch().__enter__()  # until the process ends
        exit_code = report_errors(lambda: _main(flags))
    finally:
        sys.stdout.flush()
        os._exit(exit_code)


def _main(flags: Sequence[str]) -> int:
    request = parse(flags)
    if request.known("training.dry_run") is not None:
        return print_dry_run(request)
    with joined_ranks(request) as ranks:
        trainer = Trainer(ranks)
        start_lion(trainer.engine)
        trainer.resume()
        return trainer.train()
