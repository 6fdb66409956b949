#!/usr/bin/env python3
"""Train for half an hour with a fault every 30 seconds, and compare the result with that of an undisturbed run.

    python3 scripts/soak.py                         30 minutes, two ranks on the CPU, with torchrun
    python3 scripts/soak.py --minutes 3             a short one

    start ─> fault ─> all processes are gone ─> start again ─> ... ─> SIGTERM: saved ─> the same iterations in one run: equal?

Each line is one fault: which, how long until all processes were gone, and what the next start loaded. The exit code is 1 if a fault is not
reported, a process is left, a committed checkpoint is lost, or the final state differs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "tests"),
    str(ROOT / "tests/distributed"),
    str(ROOT / "tests/checkpoint"),
]
NUM_RANKS = 2
LIMIT_SECONDS = 8
SECONDS_TO_END = 30.0 + LIMIT_SECONDS
SECONDS_TO_STEP = 120.0
"""Most time of a start until its first step."""
SECONDS_TO_TRAIN = 4.0
"""Least time of a start in its steps."""
STOPPED = "signal SIGTERM"
DIED = r"rank {rank} of 2 on \S+ \(process \d+\) died without an error"
LATE = r"rank {rank} of 2 is late"


@dataclass(frozen=True)
class Fault:
    """A fault, who plants it, and what the log says after it; RANK stands for the culprit."""

    name: str
    by: str
    """rank: the rank itself, in its next step; signal: this script, to the rank; launcher, job, start and checkpoint: see `Soak`."""
    expected: str = ""
    signal: signal.Signals = signal.SIGKILL


FAULTS = (
    Fault("SIGKILL", "signal", DIED),
    Fault("exception", "rank", r"rank {rank} of 2 failed:"),
    Fault("SIGSTOP", "signal", LATE, signal.SIGSTOP),
    Fault("torchrun killed", "launcher"),
    Fault("nan", "rank", r"first on rank {rank}: 1 values of the weight"),
    Fault("SIGTERM", "signal", STOPPED, signal.SIGTERM),
    Fault("full-disk", "rank", "No space left on device"),
    Fault("all killed", "job"),
    Fault("hang", "rank", LATE),
    Fault("bit-flip", "rank", "weights differ from those of the other ranks"),
    Fault("killed in its start", "start"),
    Fault("exit", "rank", DIED),
    Fault("damaged checkpoint", "checkpoint"),
    Fault("segmentation-fault", "rank", DIED),
    Fault("lock", "rank", LATE),
)


class WrongError(Exception):
    """The program did not do what it promises."""


class Soak:
    """The disturbed run: starts of one command, each ended by a fault.

    Args:
        folder: of the run, the logs and the process ids.
        pause: seconds before each step.
    """

    def __init__(self, folder: Path, pause: float) -> None:
        self.folder, self.save, self.pause = folder, folder / "run", pause
        self.num_starts, self.committed = 0, 0
        self.job: subprocess.Popen[bytes] | None = None
        self.damaged: int | None = None
        """Iteration of the checkpoint that is damaged: the next start loads the one before."""

    def start(self, flags: Sequence[str]) -> None:
        """Start the ranks; every other start saves in the background."""
        for file in (*self.folder.glob("rank-*.pid"), self.folder / "fault"):
            file.unlink(missing_ok=True)
        self.num_starts += 1
        words = [*command(self.save), *flags, *(["--async-save"] if self.num_starts % 2 else [])]
        environment = os.environ | {"SOAK_FOLDER": str(self.folder), "SOAK_PAUSE": str(self.pause)}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHELASTIC_LOG_LEVEL": "ERROR"}
        with self.log_file.open("wb") as log:
            self.job = subprocess.Popen(
                words, stdout=log, stderr=log, env=environment, cwd=ROOT, start_new_session=True
            )

    @property
    def log_file(self) -> Path:
        return self.folder / f"start-{self.num_starts}.log"

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def pids(self) -> dict[int, int]:
        """Return the process ids of the ranks that have started."""
        files = self.folder.glob("rank-*.pid")
        return {int(file.stem.removeprefix("rank-")): int(file.read_text() or 0) for file in files}

    def wait_until_training(self) -> None:
        """Wait for the first iteration of this start, and check what it has loaded."""
        deadline = time.monotonic() + SECONDS_TO_STEP
        while not re.search(r"iteration +\d+ *[/|]", self.log) and "> committed" not in self.log:
            require(
                time.monotonic() < deadline, f"no iteration after {SECONDS_TO_STEP:.0f} s: {self.log[-2000:]}"
            )
            require(self.job and self.job.poll() is None, f"the start failed: {self.log[-3000:]}")
            time.sleep(0.1)
        if self.num_starts > 1:
            loaded = re.search(r"> loaded \S+: iteration (\d+)", self.log)
            number = int(loaded[1]) if loaded else 0
            if self.damaged is not None:
                require(
                    0 < number < self.damaged,
                    f"loaded {number}; {self.damaged} is damaged: {self.log[-3000:]}",
                )
                self.damaged, self.committed = None, number
            require(number >= self.committed, f"loaded iteration {number}; {self.committed} was committed")

    def plant(self, fault: Fault, rank: int) -> None:
        """Cause a fault now."""
        assert self.job is not None
        if fault.by == "rank":
            (self.folder / "new").write_text(f"{fault.name} {rank}")
            (self.folder / "new").rename(self.folder / "fault")
        elif fault.by in ("signal", "start"):
            os.kill(self.pids()[rank], fault.signal)
        elif fault.by == "launcher":
            self.job.kill()
        else:
            self.kill()

    def wait_for_end(self, fault: Fault, rank: int) -> float:
        """Wait until all processes are gone; return the seconds, and check the report."""
        start = time.monotonic()
        limit = SECONDS_TO_END + (SECONDS_TO_STEP if fault.by == "rank" else 0)
        assert self.job is not None
        while self.job.poll() is None or any(map(is_alive, self.pids().values())):
            require(
                time.monotonic() - start < limit,
                f"{self.pids()} are there after {limit:g} s: {self.log[-3000:]}",
            )
            time.sleep(0.05)
        seconds = time.monotonic() - start
        found = re.search(fault.expected.format(rank=rank), self.log)
        require(found, f"{fault.expected!r} is not reported of rank {rank}: {self.log[-3000:]}")
        numbers = [int(number) for number in re.findall(r"> committed iteration (\d+) to", self.log)]
        self.committed = max([self.committed, *numbers])
        if fault.by == "checkpoint":
            self._damage_newest()
        return seconds

    def _damage_newest(self) -> None:
        newest = max(self.save.glob("iter_*[0-9]"))
        file = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
        with file.open("r+b") as data:
            data.seek(file.stat().st_size // 2)
            byte = data.read(1)
            data.seek(-1, os.SEEK_CUR)
            data.write(bytes([byte[0] ^ 16]))
        self.damaged = int(newest.name.removeprefix("iter_"))

    def kill(self) -> None:
        """Kill all processes of the present start."""
        for pid in (*([self.job.pid] if self.job else []), *self.pids().values()):
            with contextlib.suppress(ProcessLookupError):
                if is_alive(pid):
                    os.kill(pid, signal.SIGKILL)


def main() -> int:
    """Run the soak; return the exit code."""
    arguments = parsed_arguments()
    with tempfile.TemporaryDirectory(prefix="soak-", dir=arguments.folder) as name:
        soak = Soak(Path(name), arguments.pause)
        try:
            num_faults = disturb(soak, arguments.minutes * 60, arguments.interval)
            compare(soak, num_faults)
        except WrongError as error:
            print(f"FAILED {error}", flush=True)
            return 1
        finally:
            soak.kill()
    return 0


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument(
        "--interval", type=float, default=30.0, help="seconds from fault to fault, default 30"
    )
    parser.add_argument(
        "--pause",
        type=float,
        default=0.1,
        help="seconds before each step, so that the undisturbed run is shorter, default 0.1",
    )
    parser.add_argument(
        "--folder", type=Path, help="parent of the run's folder, default: that of temporary files"
    )
    return parser.parse_args()


def disturb(soak: Soak, seconds: float, interval: float) -> int:
    """Train and cause faults until the time is over, then stop by SIGTERM; return the number of faults."""
    began = time.monotonic()
    due = began + interval
    for number, fault in enumerate(itertools.cycle(FAULTS)):
        rank = (number + number // len(FAULTS)) % NUM_RANKS
        is_last = due - began > seconds
        if is_last:
            fault = Fault("the end", "signal", STOPPED, signal.SIGTERM)
        soak.start([])
        if fault.by == "start":
            while len(soak.pids()) < NUM_RANKS:
                time.sleep(0.05)
            time.sleep(number % 5)
        else:
            soak.wait_until_training()
            time.sleep(max(SECONDS_TO_TRAIN, due - time.monotonic()))
        soak.plant(fault, rank)
        ended = soak.wait_for_end(fault, rank)
        report(soak, number, fault, rank, time.monotonic() - began, ended)
        if is_last:
            return number
        due = max(due + interval, time.monotonic())
    raise AssertionError


def report(soak: Soak, number: int, fault: Fault, rank: int, seconds: float, ended: float) -> None:
    """Print one line of a fault."""
    loaded = re.search(r"> loaded \S+: iteration (\d+)", soak.log)
    print(
        f"{seconds:6.0f} s  {number + 1:3}  {fault.name}, rank {rank}: started from {loaded[1] if loaded else 0},"
        f" committed {soak.committed}, all gone after {ended:.1f} s",
        flush=True,
    )


def compare(soak: Soak, num_faults: int) -> None:
    """Train the same iterations without a fault and compare the last checkpoints and all metrics."""
    from faults.kills import content_of
    from run_here import metrics

    last = max(soak.save.glob("iter_*[0-9]"))
    iterations = int(last.name.removeprefix("iter_"))
    calm = Soak(soak.folder / "calm", pause=0.0)
    calm.folder.mkdir()
    calm.start(["--exit-interval", str(iterations), "--save-interval", str(iterations)])
    assert calm.job is not None
    calm.job.wait()
    require((calm.save / last.name).is_dir(), f"the undisturbed run failed: {calm.log[-3000:]}")
    hashes = [state_hash(content_of(save / last.name)) for save in (soak.save, calm.save)]
    print(f"{num_faults} faults, {soak.num_starts} starts, {iterations} iterations")
    print(f"state hash {hashes[0]}\nundisturbed {hashes[1]}", flush=True)
    require(hashes[0] == hashes[1], "the state differs from that of the undisturbed run")
    require(
        metrics(soak.save) == metrics(calm.save), "metrics.jsonl differs from that of the undisturbed run"
    )
    print("equal: state and all metrics", flush=True)


def state_hash(content: dict[str, object]) -> str:
    """Return the hash of all that a checkpoint stores but the settings of its run."""
    digest = hashlib.sha256()
    for part in _parts(content):
        digest.update(part)
    return digest.hexdigest()[:32]


def _parts(content: dict[str, object]) -> Iterator[bytes]:
    for name, value in sorted(content.items()):
        yield name.encode()
        yield value if isinstance(value, bytes) else repr(value).encode()


def command(save: Path) -> list[str]:
    """Return the command line of the run."""
    from run_here import MODEL

    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(NUM_RANKS),
    ]
    return [
        *torchrun,
        str(ROOT / "tests/faults/soaked_rank.py"),
        *MODEL,
        *"--train-iters 100000 --eval-iters 0 --no-eval-at-start --save-interval 10 --keep-last 3".split(),
        *"--data-parallel-sharding-strategy no_shard --check-weight-hash-across-dp-replicas-interval 5".split(),
        *f"--log-interval 10 --distributed-timeout-seconds-after-init {LIMIT_SECONDS}".split(),
        *("--save", str(save), "--load", str(save)),
    ]


def is_alive(pid: int) -> bool:
    """Return whether a process is there and belongs to the soak: zombies have no command line."""
    try:
        return b"soak" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def require(is_right: object, problem: str) -> None:
    """Raise WrongError unless a condition holds."""
    if not is_right:
        raise WrongError(problem)


if __name__ == "__main__":
    sys.exit(main())
