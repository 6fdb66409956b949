#!/usr/bin/env python3
"""Print what a GPU's memory holds at the peak of a training step: bytes by the function of megatrain that allocated them.

    python scripts/benchmarks/memory_sites.py -- --config configs/benchmarks/a1.yaml
    torchrun --nproc-per-node 2 scripts/benchmarks/memory_sites.py -- --config configs/benchmarks/b5.yaml --context-parallel-size 2

Flags after `--` are those of pretrain.py. The first rank prints: bytes that the plan has, largest and reserved bytes of each step,
bytes in use after the passes of each segment, and the allocations of the last step that are live at its peak. Gigabytes are 10^9.
"""

from __future__ import annotations

import argparse
import collections
import gc
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatrain.config import Plan, parse
from megatrain.optim.lr_schedule import Hyperparams
from megatrain.parallel.batch import Batch
from megatrain.parallel.pipeline.segments import SegmentHooks, SegmentPass
from megatrain.training.build import build_schedules
from megatrain.training.engine import Engine
from megatrain.training.launch.ranks import Ranks, joined_ranks, report_errors

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)
"""Variables of torchrun that a process alone does not have."""
NUM_FRAMES = 3
"""Functions of megatrain that name an allocation, innermost first."""


class PassMemory(SegmentHooks):
    """Hooks of an executor that also note the bytes in use after each pass."""

    def __init__(self, hooks: SegmentHooks, *, collects: bool) -> None:
        super().__init__(hooks)
        self._collects = collects
        self.found: list[tuple[str, int]] = []

    def after(self, segment_pass: SegmentPass) -> None:
        super().after(segment_pass)
        if self._collects:
            gc.collect()
        self.found.append((segment_pass.kind.value, torch.cuda.memory_allocated()))


def batches_of(plan: Plan, ranks: Ranks) -> list[Batch]:
    """Return the micro-batches of a step, of random tokens: each sample is one document."""
    data, b = plan.config.data, plan.config.training.micro_batch_size
    tokens = torch.randint(plan.derived.vocab_size, (b, data.seq_length), device=ranks.device)
    positions = torch.arange(data.seq_length, device=ranks.device).expand(b, -1)
    mask = torch.ones(b, data.seq_length, device=ranks.device)
    one = Batch(tokens=tokens, labels=tokens, loss_mask=mask, position_ids=positions)
    return [one] * plan.derived.num_microbatches


def begin_plan(flags: Sequence[str]) -> Callable[[], list[int]]:
    """Begin a --dry-run of this launch; return a function that returns the bytes of each stage."""
    command = [sys.executable, "pretrain.py", *flags, "--world-size", os.environ.get("WORLD_SIZE", "1")]
    alone = {name: value for name, value in os.environ.items() if name not in LAUNCH}
    process = subprocess.Popen(
        [*command, "--device", "cuda", "--dry-run", "json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=alone,
    )

    def read() -> list[int]:
        plan, _ = process.communicate()
        return [stage["total"] for stage in json.loads(plan)["memory"]]

    return read


def live_at_peak(events: Iterable[dict[str, Any]]) -> tuple[int, list[dict[str, Any]]]:
    """Return the most bytes that the allocations of these events hold at a time, and the allocations that hold them."""
    live: dict[int, dict[str, Any]] = {}
    num_bytes, most, found = 0, 0, []
    events = [event for event in events if event["action"] in ("alloc", "free_requested")]
    for is_second in (False, True):
        live, num_bytes = {}, 0
        for event in events:
            if event["action"] == "alloc":
                live[event["addr"]] = event
                num_bytes += event["size"]
                if is_second and num_bytes == most:
                    return most, list(live.values())
                most = max(most, num_bytes)
            elif (freed := live.pop(event["addr"], None)) is not None:
                num_bytes -= freed["size"]
    return most, found


def site_of(event: dict[str, Any]) -> str:
    """Return the pass and the innermost functions of megatrain that allocated."""
    frames = event["frames"]
    names = {frame["name"] for frame in frames}
    kind = "recompute" if "recompute_fn" in names else "backward" if "backward" in names else "forward"
    local = [frame for frame in frames if "/megatrain/" in frame["filename"]]
    text = " < ".join(
        f"{Path(frame['filename']).stem}:{frame['line']} {frame['name']}" for frame in local[:NUM_FRAMES]
    )
    return f"{kind:<9} {text or ' < '.join(frame['name'] for frame in frames[:NUM_FRAMES])}"


def print_sites(allocations: Iterable[dict[str, Any]], count: int) -> None:
    sizes, numbers = collections.Counter[str](), collections.Counter[str]()
    for event in allocations:
        site = site_of(event)
        sizes[site] += event["size"]
        numbers[site] += 1
    for site, size in sizes.most_common(count):
        print(f"  {size / 1e9:8.3f} GB in {numbers[site]:5}  {site}"[:230])


def print_passes(found: Sequence[tuple[str, int]]) -> None:
    """Print the bytes in use after the passes, one line for each kind of consecutive passes."""
    lines: list[tuple[str, list[str]]] = []
    for kind, num_bytes in found:
        if not lines or lines[-1][0] != kind:
            lines.append((kind, []))
        lines[-1][1].append(f"{num_bytes / 1e9:.2f}")
    for kind, texts in lines[:4]:
        print(f"  after {kind:<9} {' '.join(texts)}"[:400])


def print_cycles() -> None:
    """Print the bytes that cycles of references hold, and the types of their objects."""
    before = torch.cuda.memory_allocated()
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    kinds = collections.Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
    kinds.update(f"function {one.__qualname__}" for one in gc.garbage if inspect.isfunction(one))
    gc.set_debug(0)
    gc.garbage.clear()
    gc.collect()
    freed = before - torch.cuda.memory_allocated()
    print(
        f"  cycles hold {freed / 1e9:.2f} GB: {', '.join(f'{n} {kind}' for kind, n in kinds.most_common(12))}"
    )


def measure(arguments: argparse.Namespace, flags: list[str]) -> int:
    planned = begin_plan(flags) if os.environ.get("RANK", "0") == "0" else list
    with joined_ranks(parse(flags)) as ranks:
        engine = Engine(ranks.plan, ranks.grid, ranks.device)
        engine.initialize()
        passes = PassMemory(engine.executor.hooks, collects=arguments.collect)
        engine.executor.hooks = passes
        batches, rates = batches_of(ranks.plan, ranks), build_schedules(ranks.plan).at(0)
        largest = [step(engine, batches, rates) for _ in range(arguments.steps - 1)]
        passes.found.clear()
        resident = torch.cuda.memory_allocated()
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=2_000_000)  # noqa: SLF001 (its documented name)
        if arguments.cycles:
            gc.collect()
            gc.disable()
        largest.append(step(engine, batches, rates))
        snapshot = torch.cuda.memory._snapshot()  # noqa: SLF001 (its documented name)
        torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001 (its documented name)
        if ranks.is_main:
            most, live = live_at_peak(snapshot["device_traces"][ranks.device.index or 0])
            of_stages = ", ".join(f"{num_bytes / 1e9:.2f}" for num_bytes in planned())
            print(f"planned {of_stages} GB, steps of the first rank: {', '.join(largest)}")
            print(
                f"in use before the last step {resident / 1e9:.2f} GB, allocated by it at its peak {most / 1e9:.2f} GB:"
            )
            print_sites(live, arguments.sites)
            print_passes(passes.found)
            if arguments.cycles:
                print_cycles()
    return 0


def step(engine: Engine, batches: Sequence[Batch], rates: Hyperparams) -> str:
    """Run a step; return its largest allocated and reserved bytes as text."""
    torch.cuda.reset_peak_memory_stats()
    engine.step(batches, rates)
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return f"{allocated / 1e9:.2f} (reserved {reserved / 1e9:.2f})"


def main() -> int:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2, help="steps to run; the last one is recorded [2]")
    parser.add_argument("--sites", type=int, default=14, help="sites to print [14]")
    parser.add_argument("--collect", action="store_true", help="collect reference cycles after each pass")
    parser.add_argument(
        "--cycles", action="store_true", help="keep cycles during the last step, and print their objects"
    )
    arguments = parser.parse_args(words[:split])
    return report_errors(lambda: measure(arguments, words[split + 1 :]))


if __name__ == "__main__":
    sys.exit(main())
