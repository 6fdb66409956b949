"""The program of a process of class J: `pretrain.py`, in which planned faults happen, each once.

JOB_FOLDER has the file `faults`. A fault is `{"rank", "place", "act", "at"}`: `act` at a place that the rank passes for the `at`-th time in this process. The folder
gets `fault-N` when fault N happens, and a line of `processes` (rank, process id) whenever a process becomes a rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import pretrain
from megatrain.config.environment import read_environment
from megatrain.training.liveness.sockets import open_sockets
from megatrain.training.restarts import supervisor

COUNTS = Counter[str]()


def main() -> int:
    """Train with the flags of the command line; return the exit code."""
    if read_environment().supervisor is not None:
        plant()
    return pretrain.main(sys.argv[1:])


def fork_process(
    words: list[str], environment: dict[str, str], log: Path, namespace: str = ""
) -> ForkedProcess:
    """Run `main` in a forked process, whose supervisor forks, too: importing torch in each takes seconds."""
    torch.set_num_threads(1)
    pid = os.fork()
    if pid:
        return ForkedProcess(pid)
    exit_code = 99
    try:
        if namespace:
            with Path(f"/run/netns/{namespace}").open() as file:
                assert ctypes.CDLL(None).setns(file.fileno(), _CLONE_NEWNET) == 0
        for descriptor in open_sockets().values():
            os.close(descriptor)
        for number in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        os.environ.clear()
        os.environ |= environment
        sys.argv = ["restarted_rank.py", *words]
        starter: Any = lambda more: fork_process(words, more, log)  # noqa: E731 (not a Popen)
        supervisor.start_process = starter
        exit_code = main()
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(exit_code)


class ForkedProcess:
    """The part of `subprocess.Popen` that is used here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def plant() -> None:
    """Let the faults happen at their places."""
    from megatrain.storage.disk import Disk
    from megatrain.training.engine import Engine
    from megatrain.training.evaluation import Evaluation
    from megatrain.training.trainer import Trainer

    at_call(Engine, "begin_step", "step")
    at_call(Evaluation, "run", "evaluation")
    at_call(Disk, "sync", "save")
    at_call(Disk, "rename", "commit")
    at_call(Trainer, "resume", "start")
    at_call(Trainer, "__init__", "", record=True)


_CLONE_NEWNET = 0x40000000


def at_call(owner: Any, name: str, place: str, *, record: bool = False) -> None:
    original = getattr(owner, name)

    def spoiled(*arguments: Any, **more: Any) -> Any:
        rank = read_environment().rank
        if record:
            with (folder() / "processes").open("a") as file:
                file.write(f"{rank} {os.getpid()}\n")
        else:
            happen(rank, place)
        return original(*arguments, **more)

    setattr(owner, name, spoiled)


def folder() -> Path:
    """Return the folder of the job."""
    return Path(os.environ["JOB_FOLDER"])


def happen(rank: int, place: str) -> None:
    """Do what the plan has for this call."""
    COUNTS[place] += 1
    if place == "step":
        time.sleep(float(os.environ.get("PAUSE", "0")))
    for number, fault in enumerate(json.loads((folder() / "faults").read_text())):
        is_here = fault["rank"] == rank and fault["place"] == place
        is_after = all((folder() / f"fault-{earlier}").exists() for earlier in fault.get("after", []))
        if is_here and is_after and (COUNTS[place] == fault.get("at", 1) or fault.get("after")):
            try:
                (folder() / f"fault-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            ACTS[fault["act"]]()


def end_host() -> None:
    """Kill all processes in this network namespace; last the supervisor, whose end ends this one."""
    own, others = Path("/proc/self/ns/net").readlink(), list[int]()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            others += [int(path.name)] * ((path / "ns/net").readlink() == own)
    for pid in sorted(set(others) - {os.getpid()}, key=lambda pid: pid == os.getppid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def cut_host() -> None:
    """Take the host from the network, then kill it: the kernel closes no connection."""
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    end_host()


def fail() -> None:
    raise RuntimeError("planted")


ACTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda: time.sleep(3600),
    "error": fail,
    "end host": end_host,
    "cut host": cut_host,
}

if __name__ == "__main__":
    from megatrain.process.exit_deadline import run_program

    run_program(main)
