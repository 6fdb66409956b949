"""Class J: restarts within the job (--inprocess-restart): processes and hosts are lost, and the others continue.

processes of a job, each with a supervisor ─> planned faults ─> the processes that stay keep their ids ─> equal to the undisturbed run

A host is a network namespace with an address on a bridge; making them needs the rights of root.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from run_here import MODEL, metrics

from faults.case import Cases, SkippedError, judge, require
from faults.kills import content_of
from faults.restarted_rank import ForkedProcess, fork_process
from megatrain.checkpoint.find import folder_name
from megatrain.data.indexed.writer import IndexedWriter

_STUCK_IN_GLOO = "does not leave its generation within --inprocess-hard-timeout, with 0 connections"
"""Gloo now and then misses the end of a connection during a send: the rank waits, and its process is replaced, too."""
ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("restarted_rank.py")
ITERATIONS, INTERVAL = 8, 2
SECONDS = 240.0
_FLAGS = [*MODEL, *"--num-layers 2 --no-mock-data --split 8,1,1 --no-eval-at-start --eval-interval 3".split()]
_FLAGS += [
    "--train-iters",
    str(ITERATIONS),
    "--save-interval",
    str(INTERVAL),
    "--inprocess-restart",
    "--inprocess-hard-timeout",
    "20",
]
_TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
_MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --expert-model-parallel-size 2"
LAYOUTS = {
    "dp": "",
    "tp2": _TP2,
    "pp2": "--pipeline-model-parallel-size 2",
    "ep2": _MOE,
    "zero3": "--data-parallel-sharding-strategy optim_grads_params",
}
Fault = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job and the faults that happen in it."""

    name: str
    faults: tuple[Fault, ...]
    layout: str = "dp"
    num_ranks: int = 4
    num_spares: int = 0
    ranks_of_host: int = 0
    """0: all processes are on one host, without namespaces."""
    flags: tuple[str, ...] = ()
    forks: bool = True
    """Processes are forked, not executed: it takes seconds less."""
    num_new: int = 1
    """Processes that become ranks later than the first ones."""

    @property
    def num_processes(self) -> int:
        return self.num_ranks + self.num_spares


def fault(rank: int, place: str = "step", act: str = "kill", **more: Any) -> Fault:
    return {"rank": rank, "place": place, "act": act, **more}


_QUICK = ("--inprocess-soft-timeout", "5")
JOBS = (
    Job(name="one process", faults=(fault(2, at=6),)),
    Job(name="executed", faults=(fault(2, at=6),), forks=False),
    Job(name="rank 0", faults=(fault(0, at=6),)),
    Job(name="two at once", faults=(fault(1, at=6), fault(3, at=6)), num_new=2),
    Job(name="before the first step", faults=(fault(1, "start"),)),
    Job(name="in a save", faults=(fault(3, "save"),)),
    Job(name="in a commit", faults=(fault(0, "commit"),)),
    Job(name="in an evaluation", faults=(fault(2, "evaluation"),)),
    Job(name="again during the recovery", faults=(fault(2, at=6), fault(1, "start", after=[0])), num_new=2),
    Job(
        name="three times",
        faults=(fault(2, at=4), fault(1, at=3, after=[0]), fault(2, at=3, after=[1])),
        num_new=3,
    ),
    Job(name="in background", faults=(fault(2, at=6),), flags=("--async-save",)),
    Job(name="an error", faults=(fault(1, act="error", at=6),)),
    Job(name="a hang", faults=(fault(1, act="hang", at=6),), flags=_QUICK),
    Job(name="stopped", faults=(fault(1, act="stop", at=6),), flags=_QUICK),
    Job(name="rank 0 stopped", faults=(fault(0, act="stop", at=6),), flags=_QUICK),
    *(Job(name=f"layout {name}", layout=name, faults=(fault(2, at=6),)) for name in LAYOUTS if name != "dp"),
    Job(
        name="a host of four, one spare host",
        num_ranks=8,
        num_spares=2,
        ranks_of_host=2,
        flags=("--micro-batch-size", "1"),
        faults=(fault(5, act="end host", at=6),),
        num_new=2,
    ),
    Job(
        name="two hosts at once",
        num_spares=2,
        ranks_of_host=1,
        faults=(fault(1, act="end host", at=6), fault(3, act="end host", at=6)),
        num_new=2,
    ),
    Job(
        name="a host, then its spare",
        num_spares=2,
        ranks_of_host=1,
        faults=(fault(2, act="end host", at=4), fault(2, act="end host", after=[0])),
        num_new=2,
    ),
    Job(
        name="a host without power",
        num_spares=2,
        ranks_of_host=2,
        faults=(fault(3, act="cut host", at=6),),
        num_new=2,
    ),
)


def restarts(count: int, folder: Path, seed: int = 0, part: tuple[int, int] = (0, 1)) -> Cases:
    """Yield `count` cases, every `part[1]`-th from `part[0]` on; more than there are jobs repeat them."""
    del seed
    for number in itertools.islice(itertools.count(*part), count):
        job = JOBS[number % len(JOBS)]
        work = functools.partial(run_case, job, folder / str(number))
        yield judge("J", f"{job.name} ({number})", work, limit_seconds=2 * SECONDS)


def run_case(job: Job, folder: Path) -> str:
    """Run a job with its faults and one without; return the outcome."""
    undisturbed = folder.parent / f"undisturbed {job.layout} {job.num_ranks} {' '.join(job.flags)}"
    if not undisturbed.exists():
        plain = dataclasses.replace(job, faults=(), num_spares=0, ranks_of_host=0, forks=True)
        run_job(plain, undisturbed)
    seconds = run_job(job, folder)
    require(len(list(folder.glob("fault-*"))) == len(job.faults), "not all faults happened")
    require(
        metrics(folder / "save") == metrics(undisturbed / "save"),
        f"other metrics than the undisturbed run: {folder}",
    )
    last = folder_name(ITERATIONS)
    is_equal = content_of(folder / "save" / last) == content_of(undisturbed / "save" / last)
    require(is_equal, f"another checkpoint than the undisturbed run: {folder}")
    lines = [line.split() for line in (folder / "processes").read_text().splitlines()]
    first, processes = lines[: job.num_ranks], {pid for _, pid in lines}
    new = len(processes) - len({pid for _, pid in first})
    stuck = (folder / "log").read_text().count(_STUCK_IN_GLOO)
    expected = job.num_new + stuck
    require(new == expected, f"{new} processes became ranks later, not {expected}: {lines}")
    shutil.rmtree(folder)
    outcome = "the others stayed" if not stuck else f"the others but {stuck}, which gloo left waiting, stayed"
    return f"{outcome}, equal to the undisturbed run ({len(job.faults)} faults; {'; '.join(seconds)})"


def write_data(prefix: Path) -> None:
    """Write a small dataset: mock data would be indexed for seconds in every process."""
    random = np.random.default_rng(0)
    with IndexedWriter(prefix, "uint16") as writer:
        for _ in range(100):
            writer.add_document([random.integers(0, 100, 30)])


def run_job(job: Job, folder: Path) -> list[str]:
    """Run the processes of a job to their end; return the times of its restarts."""
    folder.mkdir(parents=True)
    data = folder.parent / "data"
    if not Path(f"{data}.idx").exists():
        write_data(data)
    (folder / "faults").write_text(json.dumps(job.faults))
    save = ["--save", str(folder / "save"), "--load", str(folder / "save")]
    words = [*_FLAGS, "--data-path", str(data), *LAYOUTS[job.layout].split(), *save, *job.flags]
    if job.num_spares:
        words += ["--inprocess-active-world-size", str(job.num_ranks)]
    with hosts(job) as found:
        port, size = free_port(), job.ranks_of_host or job.num_processes
        processes: list[ForkedProcess | subprocess.Popen[bytes]] = []
        for rank in range(job.num_processes):
            namespace = found[rank // size][0]
            environment = os.environ | {
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "JOB_FOLDER": str(folder),
                "RANK": str(rank),
                "WORLD_SIZE": str(job.num_processes),
                "LOCAL_RANK": str(rank % size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": found[0][1],
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "eth0" if namespace else "lo",
            }
            if job.forks:
                processes.append(fork_process(words, environment, folder / "log", namespace))
            else:
                with (folder / "log").open("a") as log:
                    command = [sys.executable, str(PROGRAM), *words]
                    processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        codes = wait_for(processes)
    text = (folder / "log").read_text()
    lost = {number for number, code in enumerate(codes) if code == -9} if job.ranks_of_host else set()
    wrong = [code for number, code in enumerate(codes) if code and number not in lost]
    require(not wrong, f"exit codes {codes}: {folder / 'log'}")
    return re.findall(r"> generation \d+, ([\d.]+ s) after the failure", text)


def wait_for(processes: Sequence[ForkedProcess | subprocess.Popen[bytes]]) -> list[int | None]:
    """Return the exit codes of processes; kill those that have not ended in time."""
    deadline = time.monotonic() + SECONDS
    try:
        while time.monotonic() < deadline and any(one.poll() is None for one in processes):
            time.sleep(0.1)
        return [one.poll() for one in processes]
    finally:
        for one in processes:
            one.kill()
            one.wait()


@contextlib.contextmanager
def hosts(job: Job) -> Iterator[list[tuple[str, str]]]:
    """Make the namespaces of a job; yield name and address of each."""
    if not job.ranks_of_host:
        yield [("", "127.0.0.1")]
        return
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise SkippedError("network namespaces need the rights of root, and iproute2")
    number = os.getpid() % 60000
    bridge, net = f"br{number}", f"10.{100 + number // 256 % 100}.{number % 256}"
    names = [
        (f"h{number}-{index}", f"{net}.{index + 1}")
        for index in range(job.num_processes // job.ranks_of_host)
    ]
    undo: list[str] = []
    try:
        ip(f"link add {bridge} type bridge", f"link set {bridge} up")
        undo.append(f"link delete {bridge}")
        for index, (name, address) in enumerate(names):
            ip(f"netns add {name}")
            undo.append(f"netns delete {name}")
            ip(f"link add v{number}-{index} type veth peer name eth0 netns {name}")
            undo.append(f"link delete v{number}-{index}")  # the kernel would do it later than the next job
            ip(
                f"link set v{number}-{index} master {bridge} up",
                f"-n {name} addr add {address}/24 dev eth0",
                f"-n {name} link set eth0 up",
                f"-n {name} link set lo up",
            )
        yield names
    finally:
        ip(*reversed(undo))


def ip(*commands: str) -> None:
    for command in commands:
        ended = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SkippedError(f"ip {command}: {ended.stderr.strip()}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
