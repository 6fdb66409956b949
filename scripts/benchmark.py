#!/usr/bin/env python3
"""Train benchmark cases for a few iterations and print their speed beside what others reach on the same GPUs.

    python3 scripts/benchmark.py --case A1 S1
    python3 scripts/benchmark.py --case B1 --profile -- --no-overlap-grad-reduce

A case is `configs/benchmarks/<case>.yaml`; what follows `--` is given to pretrain.py as well. Figures are medians of the
last iterations. With --profile, two more iterations are profiled at the end, and the table says where the time went.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Case:
    """GPUs that a case needs, and what peers reach with it: tokens a second and GPU, peak memory in 10^9 bytes.

    Megatron-LM core 0.20.0 of 2026-08-22 with Transformer Engine 2.20.2, torchtitan 0.2.2, both with torch 2.11.0+cu130
    on H200 SXM, synthetic data; `bare` is a step of the fastest parts with nothing around them.
    """

    num_gpus: int
    megatron: float
    megatron_gb: float
    torchtitan: float | None = None
    bare: float | None = None


CASES = {
    "A1": Case(1, 19_740, 107.0, torchtitan=19_530, bare=21_180),
    "B1": Case(4, 10_492, 115.4, torchtitan=9_650),
    "B3": Case(4, 8_296, 46.2),
    "S1": Case(1, 417_000, 52.4),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="+", choices=sorted(CASES), default=["A1"])
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("flags", nargs="*", help="for pretrain.py, after --")
    arguments = parser.parse_args()
    rows = [measure(name, arguments) for name in arguments.case]
    print(
        f"\n{'case':<5} {'ms':>8} {'tokens/s/GPU':>13} {'TFLOP/s':>8} {'MFU':>6} {'peak GB':>8} {'first s':>8}"
        f"   {'Megatron-LM':>20} {'torchtitan':>11} {'bare step':>10}"
    )
    for row in rows:
        print(row)
    return 0 if all(rows) else 1


def measure(name: str, arguments: argparse.Namespace) -> str:
    """Run a case; its row of the table, empty where it failed."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        iterations = arguments.iterations
        command = [
            *(
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(case.num_gpus),
            ),
            *(
                "pretrain.py",
                "--config",
                f"configs/benchmarks/{name.lower()}.yaml",
                "--metrics-file",
                str(metrics),
            ),
            *("--train-iters", str(iterations + 2 * arguments.profile)),
            *arguments.flags,
        ]
        if arguments.profile:
            command += ["--profile", "--profile-step-start", str(iterations), "--profile-dir", folder]
            command += ["--profile-step-end", str(iterations + 2)]
        print("$", *command[1:], flush=True)
        began, first = time.perf_counter(), None
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line[:300].rstrip(), flush=True)
                if first is None and " iteration " in line and "elapsed time" in line:
                    first = time.perf_counter() - began
        if process.returncode:
            print(f"case {name}: exit code {process.returncode}", file=sys.stderr)
            return ""
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return row(name, case, [line for line in lines if "iteration_ms" in line][:iterations], first or 0.0)


def row(name: str, case: Case, lines: list[dict[str, Any]], first_seconds: float) -> str:
    """Medians over all iterations but the first five."""
    steady = lines[min(5, len(lines) - 1) :]

    def median(key: str) -> float:
        return statistics.median(line[key] or 0.0 for line in steady)

    speed, memory = (
        median("tokens_per_second_per_gpu"),
        max(line["max_memory_bytes"] or 0 for line in lines) / 1e9,
    )
    peers = (
        f"{case.megatron:>8,.0f} x{speed / case.megatron:5.3f} {case.megatron_gb:4.0f}G",
        f"{case.torchtitan:,.0f}" if case.torchtitan else "-",
        f"{case.bare:,.0f}" if case.bare else "-",
    )
    return (
        f"{name:<5} {median('iteration_ms'):8.0f} {speed:13,.0f} {median('tflops_per_gpu'):8.1f} {median('mfu'):6.1%} "
        f"{memory:8.1f} {first_seconds:8.1f}   {peers[0]:>20} {peers[1]:>11} {peers[2]:>10}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
