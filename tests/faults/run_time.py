"""Class R: faults inside a running step, a save or an evaluation, on two or three ranks.

run with a fault in one rank ─> culprit, phase, time of the report ─> all processes are gone ─> resume: equal to the unbroken run
"""

from __future__ import annotations

import ctypes
import errno
import functools
import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from forked_job import ForkedJob
from run_here import MODEL, metrics

from faults.case import Cases, judge, require
from faults.kills import content_of
from megatrain.checkpoint.find import folder_name
from megatrain.data.samples.loader import BatchLoader
from megatrain.model.embedding import Embedding
from megatrain.optim.sharded import ShardedOptimizer
from megatrain.storage.disk import Disk
from megatrain.training import evaluation, losses
from megatrain.training.engine import Engine
from megatrain.training.faults import responses
from megatrain.training.liveness.heartbeat import Heartbeat

LIMIT = 3
SECONDS_TO_REPORT = 5.0
SECONDS_TO_END = 30.0
_SECONDS_OF_CASE = 300.0
ITERATIONS, BAD, INTERVAL = 8, 5, 2
_BASE = [*MODEL, "--train-iters", str(ITERATIONS), "--no-eval-at-start", "--save-interval", str(INTERVAL)]
_PLAIN = ("--eval-iters", "0")
_EVALUATES = ("--eval-iters", "1", "--eval-interval", "5")
_STILL_ALIVE = 600.0
Plant = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault and what a run must do about it."""

    name: str
    plant: Plant
    """Called in the culprit before the run."""
    expected: str
    """Pattern in the output of the ranks; CULPRIT and PID stand for those of the culprit."""
    exit_codes: tuple[int, ...]
    """Allowed exit codes; negative ones: killed by a signal."""
    flags: tuple[str, ...] = _PLAIN
    num_ranks: int = 2
    culprits: tuple[int, ...] = (0, 1)
    is_late: bool = False
    """The run reports late ranks, after the limit."""
    everywhere: Plant = field(default=lambda: None)
    """Called in all ranks."""


def before_iteration(number: int, then: Callable[[Engine], None]) -> None:
    """Call `then` before the step of an iteration begins, on this rank."""
    begin = Engine.begin_step

    def spoiled(engine: Engine, *arguments: Any, **more: Any) -> Any:
        if more["first_sample"] == (number - 1) * _global_batch(engine):
            print_time()
            then(engine)
        return begin(engine, *arguments, **more)

    Engine.begin_step = spoiled  # type: ignore[method-assign]


def print_time() -> None:
    """Say when the fault happens; the last time counts."""
    print(f"FAULT {time.time()}", flush=True)


def _global_batch(engine: Engine) -> int:
    return engine.plan.config.training.global_batch_size


def at_step(then: Plant) -> Plant:
    return lambda: before_iteration(BAD, lambda _: then())


def at_call(owner: Any, name: str, then: Plant) -> Plant:
    """Call `then` in the first call of a method after the bad iteration has begun."""

    def plant() -> None:
        state = {"is_due": False}
        before_iteration(BAD, lambda _: state.update(is_due=True))
        original = getattr(owner, name)

        @functools.wraps(original)
        def spoiled(*arguments: Any, **more: Any) -> Any:
            if state["is_due"]:
                state["is_due"] = False
                print_time()
                then()
            return original(*arguments, **more)

        setattr(owner, name, spoiled)

    return plant


def sleeps() -> None:
    time.sleep(_STILL_ALIVE)


def holds_the_lock() -> None:
    while True:
        ctypes.PyDLL(None).sleep(int(_STILL_ALIVE))


def fills_the_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def raises(error: BaseException) -> Plant:
    def fail() -> None:
        raise error

    return fail


def sends(number: signal.Signals) -> Plant:
    return lambda: os.kill(os.getpid(), number)


def loader(then: Plant) -> Plant:
    """Call `then` in a thread that reads the samples of the bad iteration."""

    def plant() -> None:
        fill = BatchLoader._fill

        def spoiled(own: Any, block: Any, step: Any, number: int) -> None:
            if step.consumed_samples == (BAD - 1) * 8:
                then()
            fill(own, block, step, number)

        before_iteration(BAD - 1, lambda _: None)
        BatchLoader._fill = spoiled  # type: ignore[method-assign]

    return plant


def spoils_the_loss(factor: float) -> Plant:
    """Multiply the loss of the bad iteration on all ranks: each computes the same mean."""

    def plant() -> None:
        state, mean = {"iteration": 0}, losses.mean_losses
        begin = Engine.begin_step

        def counted(engine: Engine, *arguments: Any, **more: Any) -> Any:
            state["iteration"] = more["first_sample"] // _global_batch(engine) + 1
            return begin(engine, *arguments, **more)

        Engine.begin_step = counted  # type: ignore[method-assign]
        losses.mean_losses = lambda sums: mean(sums) * (factor if state["iteration"] == BAD else 1.0)
        responses.REFERENCE_STEPS = 3

    return plant


def poisons_a_sample() -> None:
    """Make the loss mask of the culprit's first sample NaN in the bad iteration."""
    accumulate = Engine.accumulate_gradients

    def spoiled(engine: Engine, batches: Sequence[Any], *, first_sample: int = 0) -> Any:
        if first_sample == (BAD - 1) * _global_batch(engine):
            batches[0].loss_mask[0, 0] = math.nan
        return accumulate(engine, batches, first_sample=first_sample)

    Engine.accumulate_gradients = spoiled  # type: ignore[method-assign]


def poisons_a_weight() -> None:
    def poison(engine: Engine) -> None:
        *_, (_, head) = engine.data_parallel.gathered_buckets()
        head[0] = math.nan

    before_iteration(BAD, poison)


def flips_a_bit() -> None:
    """Flip a bit of this replica's master weights, which no other rank has."""

    def flip(engine: Engine) -> None:
        next(engine.data_parallel.gathered_buckets())[1].view(torch.int32)[3] ^= 1 << 20

    before_iteration(BAD, flip)


def limits_slow_phases() -> None:
    """Let saves be as short as other phases."""
    Heartbeat.limit_seconds = lambda beat, _phase: beat.training_seconds  # type: ignore[method-assign]


def is_slow() -> None:
    begin = Engine.begin_step

    def slow(engine: Engine, *arguments: Any, **more: Any) -> Any:
        time.sleep(0.4)
        return begin(engine, *arguments, **more)

    Engine.begin_step = slow  # type: ignore[method-assign]


def late(where: str) -> str:
    return rf"\n  rank CULPRIT on \S+ \(process PID\): iteration \d, {where}"


DIED = r"rank CULPRIT of 2 on \S+ \(process PID\) died without an error"
FAULTS = (
    Fault(name="SIGKILL", plant=at_step(sends(signal.SIGKILL)), expected=DIED, exit_codes=(-9, 1)),
    Fault(name="segmentation fault", plant=at_step(lambda: ctypes.string_at(0)), expected=DIED, exit_codes=(-11, 1)),
    Fault(name="os._exit", plant=at_step(lambda: os._exit(5)), expected=DIED, exit_codes=(5, 1)),
    Fault(name="exception", plant=at_step(raises(ValueError("planted"))), expected="rank CULPRIT of 2 failed:\nTraceback", exit_codes=(1,)),
    Fault(name="out of memory", plant=at_step(raises(MemoryError("planted"))), expected="out of memory during iteration 5: .* asked for in host memory", exit_codes=(1,)),
    Fault(name="sys.exit", plant=at_step(lambda: sys.exit(7)), expected="SystemExit: 7", exit_codes=(7,)),
    Fault(name="SIGSTOP", plant=at_step(sends(signal.SIGSTOP)), expected=late("step, stopped by a signal"), exit_codes=(-9, 1), is_late=True),
    Fault(name="holds Python's lock", plant=at_step(holds_the_lock), expected=late("step, does not answer"), exit_codes=(-9, 1), is_late=True),
    Fault(name="hang between steps", plant=at_step(sleeps), expected=late("step\n"), exit_codes=(1,), is_late=True),
    Fault(name="hang in the loader", plant=loader(sleeps), expected=late("data\n"), exit_codes=(1,), is_late=True),
    Fault(name="hang in forward", plant=at_call(Embedding, "forward", sleeps), expected=late("forward\n"), exit_codes=(1,), is_late=True),
    Fault(name="hang in backward", plant=at_call(torch.autograd, "backward", sleeps), expected=late("backward\n"), exit_codes=(1,), is_late=True),
    Fault(name="hang in the optimizer", plant=at_call(ShardedOptimizer, "_update", sleeps), expected=late("optimizer\n"), exit_codes=(1,), is_late=True),
    Fault(name="hang in a collective", plant=at_call(torch.distributed, "all_reduce", sleeps), expected=late(r"[\w ]+\n"), exit_codes=(1,), is_late=True),
    Fault(name="hang in evaluation", plant=at_call(evaluation, "evaluate", sleeps), expected=late("evaluation\n"), exit_codes=(1,), is_late=True, flags=_EVALUATES),
    Fault(name="hang in a save", plant=at_call(Disk, "create", sleeps), expected=late("checkpoint save\n"), exit_codes=(1,), is_late=True, everywhere=limits_slow_phases),
    Fault(name="another collective", plant=at_step(lambda: torch.distributed.all_reduce(torch.ones(1))), expected=r"late: no progress|no rank is late: all wait", exit_codes=(1,), is_late=True, flags=(*_PLAIN, "--tensor-model-parallel-size", "2")),
    Fault(name="slow rank", plant=is_slow, expected="> ended at iteration 8 of 8: the target is reached", exit_codes=(0,)),
    Fault(name="dead loader", plant=loader(raises(OSError(errno.EIO, "Input/output error", "corpus.bin"))), expected=r"rank CULPRIT of 2 failed:[\s\S]*OSError: \[Errno 5\] Input/output error: 'corpus.bin'", exit_codes=(1,)),
    Fault(name="NaN in a sample", plant=poisons_a_sample, expected="first on rank CULPRIT: the loss mask of samples", exit_codes=(1,)),
    Fault(name="NaN in a weight", plant=poisons_a_weight, expected="first on rank CULPRIT: 1 values of the weight", flags=(*_PLAIN, "--data-parallel-sharding-strategy", "no_shard"), exit_codes=(1,)),
    Fault(name="NaN, skipped", plant=poisons_a_sample, expected=r"iteration 5 is not finite and updates nothing: first on rank CULPRIT|> ended at iteration 8", exit_codes=(0,), flags=(*_PLAIN, "--on-nan", "skip")),
    Fault(name="spike", plant=lambda: None, everywhere=spoils_the_loss(100.0), expected="iteration 5: lm loss .* is more than 10 times", exit_codes=(1,), flags=(*_PLAIN, "--check-for-spiky-loss", "--on-spike", "stop"), culprits=(0,)),
    Fault(name="spike, rewound", plant=lambda: None, everywhere=spoils_the_loss(100.0), expected="> iteration 5 is skipped .rewind", exit_codes=(0,), flags=(*_PLAIN, "--check-for-spiky-loss", "--on-spike", "rewind 2"), culprits=(0,)),
    Fault(name="bit flip in one replica", plant=flips_a_bit, expected=r"weights differ from the weights of the other ranks that hold them: rank CULPRIT on", exit_codes=(1,), flags=(*_PLAIN, "--data-parallel-sharding-strategy", "no_shard", "--check-weight-hash-across-dp-replicas-interval", "1", "--global-batch-size", "6"), num_ranks=3, culprits=(0, 1, 2)),
    Fault(name="full disk", plant=at_call(Disk, "write", fills_the_disk), expected=r"No space left on device|ENOSPC", exit_codes=(1,)),
    Fault(name="SIGTERM", plant=at_step(sends(signal.SIGTERM)), expected="signal SIGTERM .exit code 75", exit_codes=(75,)),
    Fault(name="SIGINT", plant=at_step(sends(signal.SIGINT)), expected="signal SIGINT .exit code 75", exit_codes=(75,), culprits=(1,)),
    Fault(name="SIGUSR1", plant=at_step(sends(signal.SIGUSR1)), expected="signal SIGUSR1 .exit code 75", exit_codes=(75,), culprits=(0,)),
)  # fmt: skip
"""Each of them is planted in each of its culprits."""
_OTHER_RESULT = ("NaN, skipped", "spike, rewound")
"""Faults after which a run goes another way than the unbroken one."""


class Golden:
    """Unbroken runs by their flags."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cache  # noqa: B019 (it lives as long as the bench)
    def run(self, num_ranks: int, flags: tuple[str, ...]) -> Path:
        folder = self.folder / str(len(list(self.folder.glob("*"))))
        folder.mkdir(parents=True)
        job = ForkedJob(run_flags(folder / "run", flags), num_ranks, folder)
        job.wait()
        require(set(job.exit_codes.values()) == {0}, f"the unbroken run failed: {job.output(0)[-800:]}")
        return folder / "run"


def run_flags(save: Path, flags: Sequence[str]) -> list[str]:
    words = [word for flag in flags for word in flag.split()]
    return [
        *_BASE,
        *words,
        "--save",
        str(save),
        "--load",
        str(save),
        "--distributed-timeout-seconds-after-init",
        str(LIMIT),
    ]


def run_time_faults(count: int, folder: Path, seed: int = 0, part: tuple[int, int] = (0, 1)) -> Cases:
    """Yield every `part[1]`-th case, from `part[0]` on."""
    del seed
    folder.mkdir(parents=True, exist_ok=True)
    golden = Golden(folder / "golden")
    cases = [(fault, culprit) for fault in FAULTS for culprit in fault.culprits][part[0] :: part[1]]
    for number, (fault, culprit) in enumerate(cases[:count]):
        own = folder / f"case-{number}"
        own.mkdir()
        work = functools.partial(_judged, fault, culprit, own, golden)
        yield judge("R", f"{fault.name}, rank {culprit}", work, limit_seconds=_SECONDS_OF_CASE)
        shutil.rmtree(own, ignore_errors=True)


def _watched(job: ForkedJob) -> tuple[float, float]:
    """Wait until all ranks have exited; return the times of the first report of late ranks (or of the end), and of the end."""
    deadline, reported = time.monotonic() + 120, math.inf
    while job.is_running():
        if time.monotonic() > deadline:
            job.wait(to_end_seconds=0)  # kills them, and fails
        shown = (path.read_text() for path in job.folder.glob("rank-*.txt"))
        if reported == math.inf and any("no progress for" in text for text in shown):
            reported = time.time()
        time.sleep(0.05)
    return min(reported, time.time()), time.time()


def _judged(fault: Fault, culprit: int, folder: Path, golden: Golden) -> str:
    def plant(rank: int) -> None:
        fault.everywhere()
        if rank == culprit:
            fault.plant()

    save = folder / "run"
    job = ForkedJob(run_flags(save, fault.flags), fault.num_ranks, folder, plant)
    try:
        reported, ended = _watched(job)
    finally:
        for rank in set(range(fault.num_ranks)) - job.exit_codes.keys():
            job.kill(rank)
    output = "\n".join(job.output(rank) for rank in range(fault.num_ranks))
    pattern = fault.expected.replace("CULPRIT", str(culprit)).replace("PID", str(job.pids[culprit]))
    require(re.search(pattern, output), f"{pattern!r} is not reported: {output[-1500:]}")
    codes = set(job.exit_codes.values())
    require(codes <= set(fault.exit_codes), f"exit codes {job.exit_codes}")
    planted = [float(number) for number in re.findall(r"^FAULT (\S+)$", output, re.MULTILINE)]
    if planted:
        seconds, most = ended - planted[-1], SECONDS_TO_END + LIMIT * fault.is_late
        require(seconds < most, f"all processes have ended only after {seconds:.1f} s")
    if fault.is_late:
        require(len(re.findall("no progress for", output)) == 1, f"not one report: {output[-1500:]}")
        seconds = reported - planted[-1]
        require(seconds < LIMIT + SECONDS_TO_REPORT, f"reported after {seconds:.1f} s")
    if fault.name in _OTHER_RESULT:
        return "reported; the run continues"
    unbroken = golden.run(fault.num_ranks, fault.flags)
    if codes != {0}:
        again = ForkedJob(run_flags(save, fault.flags), fault.num_ranks, folder)
        again.wait(to_end_seconds=120)
        require(set(again.exit_codes.values()) == {0}, f"the resumed run: {again.output(0)[-800:]}")
    require(metrics(save) == metrics(unbroken), "the metrics differ from those of the unbroken run")
    name = folder_name(ITERATIONS)
    is_equal = content_of(save / name) == content_of(unbroken / name)
    require(is_equal, "the last checkpoint differs from that of the unbroken run")
    kind = (
        "late rank, phase and stack reported"
        if fault.is_late
        else "culprit reported"
        if codes & {1, 5, 7}
        else "stopped and saved"
    )
    return f"{kind if codes != {0} else 'no false alarm'}; {'resumed' if codes != {0} else 'ended'} equal to the unbroken run"
