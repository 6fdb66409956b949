#!/usr/bin/env python3
"""Compare the memory that --dry-run plans with the measured peak of a GPU, for shapes with different kinds of peaks.

    python3 scripts/benchmarks/memory.py
    python3 scripts/benchmarks/memory.py --shape a1 gpt2-64 -- --recompute-granularity selective

Each shape is planned and trained for three iterations in separate processes; flags after `--` are passed to both. The
measured peak is `torch.cuda.max_memory_allocated`; reserved is the allocator's memory at the end. The exit code is 1 if
a plan is more than 5 % off.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 0.05

A1 = "--config configs/benchmarks/a1.yaml"
GPT2 = "--config configs/benchmarks/s1.yaml"
LLAMA = (
    f"{A1} --num-layers 8 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 --num-query-groups 4"
    " --vocab-size 64000 --seq-length 4096 --micro-batch-size 4 --global-batch-size 8"
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

SHAPES = {
    "a1": A1,
    "a1-norms-kept": f"{A1} --no-recompute-norms",
    "gpt2-16": f"{GPT2} --micro-batch-size 16 --global-batch-size 32",
    "gpt2-64": f"{GPT2} --micro-batch-size 64 --global-batch-size 128",
    "gpt2-fp16": f"{GPT2} --no-bf16 --fp16 --micro-batch-size 16 --global-batch-size 32",
    "gpt2-dropout": f"{GPT2} --hidden-dropout 0.1 --micro-batch-size 16 --global-batch-size 32",
    "llama": LLAMA,
    "llama-core": f"{LLAMA} --recompute-granularity selective",
    "llama-mlp": f"{LLAMA} --recompute-granularity selective --recompute-modules mlp",
    "llama-full": f"{LLAMA} {FULL}",
    "long": f"{LLAMA} --seq-length 65536 --micro-batch-size 1 --global-batch-size 2",
    "documents": f"{LLAMA} --reset-attention-mask",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=list(SHAPES))
    parser.add_argument("flags", nargs="*", help="flags of pretrain.py, after --")
    arguments = parser.parse_args()
    began, rows = time.perf_counter(), []
    with ThreadPoolExecutor(max_workers=2) as planners:
        plans: dict[str, Future[dict[str, Any]]] = {
            name: planners.submit(planned, [*SHAPES[name].split(), *arguments.flags])
            for name in arguments.shape
        }
        for name in arguments.shape:
            found = measured([*SHAPES[name].split(), *arguments.flags])
            rows.append(row(name, plans[name].result(), found))
            print(rows[-1][0], flush=True)
    print(
        f"\n{'shape':<14} {'planned GB':>11} {'measured GB':>12} {'ratio':>7} {'reserved GB':>12}   peak as planned"
    )
    for text, _ in rows:
        print(text)
    print(f"{time.perf_counter() - began:.0f} s")
    return 0 if all(is_within_tolerance for _, is_within_tolerance in rows) else 1


def planned(flags: list[str]) -> dict[str, Any]:
    """Return the memory of one rank from `--dry-run json`."""
    command = [
        sys.executable,
        "pretrain.py",
        *flags,
        "--world-size",
        "1",
        "--device",
        "cuda",
        "--dry-run",
        "json",
    ]
    memory: list[dict[str, Any]] = json.loads(run(command))["memory"]
    return memory[0]


def measured(flags: list[str]) -> dict[str, int]:
    """Train; return the largest memory figures of the metrics, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        more = ["--device", "cuda", "--train-iters", "3", "--metrics-file", str(metrics)]
        run([sys.executable, "pretrain.py", *flags, *more])
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines = [line for line in lines if "max_memory_bytes" in line]
    return {name: max(line[name] for line in lines) for name in ("max_memory_bytes", "reserved_memory_bytes")}


def run(command: list[str]) -> str:
    """Run a command and return its output; on failure print it and exit."""
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(
            f"$ {' '.join(command)}\n{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}\nexit code {ended.returncode}"
        )
    return ended.stdout


def row(name: str, plan: dict[str, Any], found: dict[str, int]) -> tuple[str, bool]:
    """Return a line of the table, and whether the plan is within the tolerance."""
    ratio = plan["total"] / found["max_memory_bytes"]
    numbers = (plan["total"], found["max_memory_bytes"], found["reserved_memory_bytes"])
    planned_gb, measured_gb, reserved_gb = (number / 1e9 for number in numbers)
    text = f"{name:<14} {planned_gb:11.2f} {measured_gb:12.2f} {ratio:7.3f} {reserved_gb:12.2f}   {plan['peak_at']}"
    return text, abs(ratio - 1) <= TOLERANCE


if __name__ == "__main__":
    raise SystemExit(main())
