#!/usr/bin/env python3
"""Compare steps of every pipeline schedule with the simulator, fed with measured times, and their memory with the plan.

    python3 scripts/benchmarks/pipeline.py                       two GPUs: 16 layers of Llama-3-8B, s 8192, global batch 16
    python3 scripts/benchmarks/pipeline.py --schedule 1f1b zb-v --ranks 4 -- --num-layers 32
    python3 scripts/benchmarks/pipeline.py --device cpu          a tiny model over gloo, without memory

A row per schedule. The simulator gets the median times of this run's own passes and messages; the time of the optimizer
is added. Planned memory is that of `--dry-run`, measured memory `torch.cuda.max_memory_allocated` of the rank with most.
Flags after `--` are passed to all runs. The exit code is 1 if a step is more than 5 % off, or memory more than 2 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatrain.config import parse
from megatrain.config.schema.pipeline_schedules import PIPELINE_SCHEDULES, flags_of_schedule
from megatrain.parallel.batch import Batch
from megatrain.parallel.collectives import all_reduce, begin_receive, begin_send, gather_json
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.pipeline.actions import Action, ActionKind
from megatrain.parallel.pipeline.executor import Executor, deferred_weights, segments_in_turn
from megatrain.parallel.pipeline.point_to_point import step_to_peer
from megatrain.parallel.pipeline.segments import SegmentPass
from megatrain.parallel.pipeline.simulator import StageCosts, simulate
from megatrain.training.build import build_schedules
from megatrain.training.engine import Engine
from megatrain.training.launch.ranks import Ranks, joined_ranks, report_errors

ROOT = Path(__file__).resolve().parents[2]
STEP_TOLERANCE, MEMORY_TOLERANCE = 0.05, 0.02
MODELS = {
    "cuda": f"--config {ROOT}/configs/benchmarks/b4.yaml --num-layers 16",
    "cpu": (
        "--num-layers 8 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --normalization RMSNorm --swiglu"
        " --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 --attention-dropout 0"
        " --untie-embeddings-and-output-weights --mock-data --tokenizer-type NullTokenizer --vocab-size 501"
        " --micro-batch-size 1 --global-batch-size 8 --train-iters 20 --lr 1e-4 --eval-iters 0"
    ),
}
SCHEDULES = {name: flags_of_schedule(name) for name in PIPELINE_SCHEDULES}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedule", nargs="+", choices=sorted(SCHEDULES), default=list(SCHEDULES))
    parser.add_argument("--ranks", type=int, default=2, help="pipeline stages")
    parser.add_argument("--device", choices=sorted(MODELS), default="cuda")
    parser.add_argument("--iterations", type=int, default=8, help="steps; the first three do not count")
    parser.add_argument("--measure", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="flags of pretrain.py, after --")
    arguments = parser.parse_args()
    if arguments.measure is not None:
        return report_errors(lambda: measure(arguments))
    rows = [row(name, *measured(name, arguments)) for name in arguments.schedule]
    print(
        f"\n{'schedule':<12} {'step ms':>9} {'simulated':>10} {'ratio':>6} {'bubble':>7} {'message ms':>11}"
        f" {'optimizer ms':>13}   {'peak GB, planned, ratio by rank'}"
    )
    for text, _ in rows:
        print(text)
    return 0 if all(is_within_tolerance for _, is_within_tolerance in rows) else 1


def measured(name: str, arguments: argparse.Namespace) -> tuple[dict[str, Any], list[int]]:
    """Run a schedule; return what its ranks measured, and the planned bytes of each rank."""
    stages = f"--pipeline-model-parallel-size {arguments.ranks} --pipeline-model-parallel-layout auto"
    flags = f"{MODELS[arguments.device]} {stages} {SCHEDULES[name]} --device {arguments.device}".split()
    flags += arguments.flags
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(arguments.ranks),
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        own = [__file__, "--iterations", str(arguments.iterations), "--measure", str(file), "--", *flags]
        run([*launcher, *own])
        found: dict[str, Any] = json.loads(file.read_text())
    dry_run = ["pretrain.py", *flags, "--world-size", str(arguments.ranks), "--dry-run", "json"]
    plan = json.loads(run([sys.executable, *dry_run]))
    return found, [memory["total"] for memory in plan["memory"]]


def run(command: Sequence[str]) -> str:
    """Run a command and return its output; on failure print it and exit."""
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"$ {' '.join(command)}\n{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}")
    return ended.stdout


def row(name: str, found: dict[str, Any], planned: Sequence[int]) -> tuple[str, bool]:
    """Return a line of the table, and whether step and memory are within their tolerances."""
    ratio = found["step"] / found["simulated"]
    memory = ""
    is_good = abs(ratio - 1) <= STEP_TOLERANCE
    for peak, plan in zip(found["peaks"], planned, strict=True) if any(found["peaks"]) else ():
        memory += f"   {peak / 1e9:.2f} {plan / 1e9:.2f} {peak / plan:.3f}"
        is_good &= abs(peak / plan - 1) <= MEMORY_TOLERANCE
    text = (
        f"{name:<12} {found['step'] * 1e3:9.1f} {found['simulated'] * 1e3:10.1f} {ratio:6.3f} {found['bubble']:7.1%}"
        f" {found['transfer'] * 1e3:11.3f} {found['rest'] * 1e3:13.1f}{memory}"
    )
    print(text, flush=True)
    return text, is_good


# ---- the program of each rank


def measure(arguments: argparse.Namespace) -> int:
    """Train on this rank; rank 0 writes the measurements of all."""
    with joined_ranks(parse(arguments.flags)) as ranks:
        engine = Engine(ranks.plan, ranks.grid, ranks.device)
        engine.initialize()
        timed = TimedExecutor(engine)
        seconds = [timed.step(batches(ranks)) for _ in range(arguments.iterations)][3:]
        transfer = message_seconds(engine.executor, ranks.grid)
        cuda = ranks.device.type == "cuda"
        own = {
            "step": statistics.median(whole for whole, _ in seconds),
            "rest": statistics.median(whole - inside for whole, inside in seconds),
            "passes": timed.medians(num_skipped=3),
            "peak": torch.cuda.max_memory_allocated() if cuda else 0,
        }
        everyone = gather_json(own, ranks.grid.world, ranks.device)
        if ranks.is_main:
            Path(arguments.measure).write_text(json.dumps(summary(engine, everyone, transfer)))
    return 0


def summary(engine: Engine, everyone: Sequence[dict[str, Any]], transfer: float) -> dict[str, Any]:
    """Return the measured and the simulated step in seconds; the rank that ends last waits least for the optimizer."""
    placement = engine.pipeline.placement
    count = engine.plan.derived.num_microbatches
    costs = MeasuredCosts(
        [], [], [], transfer, seconds={k: v for own in everyone for k, v in own["passes"].items()}
    )
    actions = [engine.pipeline.training(rank, count) for rank in range(placement.num_ranks)]
    simulation = simulate(actions, costs, placement)
    rest = min(own["rest"] for own in everyone)
    return {
        "step": max(own["step"] for own in everyone),
        "simulated": simulation.duration + rest,
        "bubble": simulation.bubble_fraction,
        "transfer": transfer,
        "rest": rest,
        "peaks": [own["peak"] for own in everyone],
    }


@dataclass(frozen=True)
class MeasuredCosts(StageCosts):
    """Seconds of the passes by kind and virtual stage, with and without deferred weight gradients."""

    seconds: dict[str, float] = field(default_factory=dict)

    def of(self, kind: ActionKind, stage: int, *, defers_weights: bool) -> float:
        return self.seconds[pass_name(kind, stage, defers_weights=defers_weights)]


def pass_name(kind: ActionKind, stage: int, *, defers_weights: bool) -> str:
    return f"{kind.value} {stage} {defers_weights}"


class TimedExecutor:
    """The executor of an engine, with the times of its passes. It serves as the executor's hooks."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.hooks = engine, engine.executor.hooks
        self.clock = Clock(engine.device)
        self.marks: list[tuple[Any, Any]] = []
        """Start and end of each segment's pass in this step."""
        self.steps: list[list[tuple[str, float]]] = []
        """Name and seconds of each pass, by step."""
        self._began: Any = None
        self._inside: tuple[Any, Any] = (None, None)
        engine.executor.hooks = self
        self._run = engine.executor.run
        engine.executor.run = self.run  # type: ignore[method-assign]

    def step(self, micro_batches: Sequence[Batch]) -> tuple[float, float]:
        """Run a step; return its seconds, and those of the executor."""
        self.marks = []
        all_reduce(torch.zeros(1, device=self.engine.device), self.engine.grid.world)
        self.clock.wait()
        began = self.clock.now()
        self.engine.step(micro_batches, build_schedules(self.engine.plan).at(0))
        ended = self.clock.now()
        self.clock.wait()
        self.steps.append(self._passes())
        return self.clock.seconds(began, ended), self.clock.seconds(began, self._inside[1])

    def run(self, actions: Sequence[Action], *arguments: Any) -> None:
        self.actions, start = actions, self.clock.now()
        self._run(actions, *arguments)
        self._inside = start, self.clock.now()

    def _passes(self) -> list[tuple[str, float]]:
        executor, deferred = self.engine.executor, deferred_weights(self.actions)
        pairs = [pair for action in self.actions for pair in segments_in_turn(action, executor.chunks)]
        order = [one for pair in pairs for one, _ in pair]
        sums: dict[Action, float] = {}
        for one, (start, end) in zip(order, self.marks, strict=True):
            sums[one] = sums.get(one, 0.0) + self.clock.seconds(start, end)
        return [
            (
                pass_name(
                    one.kind,
                    executor.placement.stage(self.engine.grid.pp.rank, one.chunk),
                    defers_weights=(one.microbatch, one.chunk) in deferred,
                ),
                seconds,
            )
            for one, seconds in sums.items()
        ]

    def medians(self, *, num_skipped: int) -> dict[str, float]:
        """Return the median seconds of each kind of pass."""
        found: dict[str, list[float]] = {}
        for step in self.steps[num_skipped:]:
            for name, seconds in step:
                found.setdefault(name, []).append(seconds)
        return {name: statistics.median(seconds) for name, seconds in found.items()}

    def on_schedule(self, passes: Sequence[SegmentPass]) -> None:
        self.hooks.on_schedule(passes)

    def before(self, segment_pass: SegmentPass) -> None:
        self.hooks.before(segment_pass)
        self._began = self.clock.now()

    def after(self, segment_pass: SegmentPass) -> None:
        self.marks.append((self._began, self.clock.now()))
        self.hooks.after(segment_pass)

    def on_gradients(self, segment: int, *, is_last: bool) -> None:
        self.hooks.on_gradients(segment, is_last=is_last)


class Clock:
    """Times on the stream of a GPU, or on the host."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"

    def now(self) -> Any:
        """Return a mark."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Wait until all marks have been reached."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks."""
        return float(start.elapsed_time(end) / 1e3 if self.is_cuda else end - start)


def batches(ranks: Ranks) -> list[Batch]:
    """Return random micro-batches of a step."""
    plan, device = ranks.plan, ranks.device
    shape = (plan.config.training.micro_batch_size, plan.config.data.seq_length + 1)
    positions = torch.arange(shape[1] - 1, device=device).expand(shape[0], -1)
    ids = [
        torch.randint(plan.derived.vocab_size, shape, device=device)
        for _ in range(plan.derived.num_microbatches)
    ]
    mask = torch.ones(shape[0], shape[1] - 1, device=device)
    return [Batch(tokens=x[:, :-1], labels=x[:, 1:], loss_mask=mask, position_ids=positions) for x in ids]


def message_seconds(executor: Executor, grid: RankGrid, *, times: int = 10) -> float:
    """Return the seconds of a message from the first rank to the second; other ranks return 0."""
    channel = next(one for one in grid.channels if one.is_forward)
    if (channel.sender, channel.receiver) != (0, 1):
        return 0.0
    x = torch.zeros(executor.hidden_shape, dtype=executor.dtype, device=executor.device)
    clock, group = Clock(executor.device), grid.channels[channel]
    begin = begin_send if grid.pp.rank == 0 else begin_receive
    begin(x, group, step_to_peer(group)).wait()
    clock.wait()
    start = clock.now()
    for _ in range(times):
        begin(x, group, step_to_peer(group)).wait()
    end = clock.now()
    clock.wait()
    return clock.seconds(start, end) / times


if __name__ == "__main__":
    raise SystemExit(main())
