#!/usr/bin/env python3
"""Train benchmark cases for a few iterations and compare their speed with other programs on the same GPUs.

    python3 scripts/benchmark.py --case A1 S1
    python3 scripts/benchmark.py --case A1 --also=--no-recompute-norms
    python3 scripts/benchmark.py --case B1 --profile -- --no-overlap-grad-reduce
    python3 scripts/benchmark.py --case B1 --gpus 2 -- --global-batch-size 8

A case is `configs/benchmarks/<case>.yaml`. Flags after `--` are passed to pretrain.py; each --also measures every case once
more with its flags. V1's language model and vision tower are measured alone, too. Figures are medians of the last iterations. Other programs' figures hold for the case's own shape and
number of GPUs; the ratio to Megatron-LM compares TFLOP/s, by its formula. `roofline` is the speed that `scripts/roofline.py`
computes and the fraction reached. S1 is compared with a plain PyTorch loop (`scripts/benchmarks/plain_gpt2.py`), run in the same call.
--profile profiles two more iterations at the end and prints a table of where the time goes; nothing overlaps the last weight all-gathers.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.sentences import flags_of_sentences
from roofline import roofline_of

ROOT = Path(__file__).resolve().parents[1]
PROFILED = 2
"""Iterations that --profile adds."""


@dataclass(frozen=True)
class Case:
    """GPUs of a case and the results of other programs: tokens per second and GPU, TFLOP/s, peak memory in 10^9 bytes.

    Measured with Megatron-LM core 0.20.0 of 2026-08-22 with Transformer Engine 2.20.2, and torchtitan 0.2.2, both with torch
    2.11.0+cu130 on H200 SXM and synthetic data. `bare` is a step of the fastest kernels alone.
    """

    num_gpus: int
    megatron: float | None = None
    megatron_tflops: float = 0.0
    megatron_gb: float = 0.0
    torchtitan: float | None = None
    bare: float | None = None
    has_plain_loop: bool = False
    """True if `scripts/benchmarks/plain_gpt2.py` trains the same model."""
    has_sentences: bool = False
    """Its samples are made of sentences, for which there is no mock data (`scripts/benchmarks/sentences.py`)."""
    parts: tuple[str, ...] = ()
    """Flags that leave one part of the model each: the step is compared with the sum of their steps."""


@dataclass(frozen=True)
class Measured:
    """A row of the table and the milliseconds of a step."""

    text: str
    ms: float


LANGUAGE_ALONE = "--model-family gpt --seq-length 2048"
TOWER_ALONE = "--num-layers 1 --hidden-size 128 --ffn-hidden-size 128 --num-attention-heads 1 --seq-length 8 --vocab-size 100"


CASES = {
    "A1": Case(1, 19_740, 539, 107.0, torchtitan=19_530, bare=21_180),
    "A2": Case(1, 26_230, 716, 111.4),
    "B1": Case(4, 10_492, 540, 115.4, torchtitan=9_650),
    "B3": Case(4, 8_296, 427, 46.2),
    "B4": Case(4, 8_343, 429, 70.4),
    "B5": Case(4, 6_899, 488, 115.4),
    "B6": Case(4, 26_200, 232, 76.7),
    "B7": Case(4, 29_050, 318, 69.1),
    "B8": Case(4),
    "E1": Case(1, has_sentences=True),
    "E2": Case(1, has_sentences=True),
    "H1": Case(1),
    "S1": Case(1, 417_000, 333, 52.4, has_plain_loop=True),
    "V1": Case(1, parts=(LANGUAGE_ALONE, TOWER_ALONE)),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="+", choices=sorted(CASES), default=["A1"])
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar='"FLAGS"',
        help="measure each case again with these flags",
    )
    parser.add_argument("--gpus", type=int, help="GPUs to use [those of the case]")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("flags", nargs="*", help="flags of pretrain.py, after --")
    arguments = parser.parse_args()
    variants = [arguments.flags, *([*arguments.flags, *shlex.split(flags)] for flags in arguments.also)]
    rows, ratios = [], []
    for name in arguments.case:
        for flags in variants:
            parts = [[*flags, *shlex.split(part)] for part in CASES[name].parts]
            whole, *own = [measure(name, of_part, arguments) for of_part in (flags, *parts)]
            rows += [whole, *own]
            if whole and all(own) and own:
                total = sum(one.ms for one in own if one)
                ratios.append(
                    f"{name}: {whole.ms:.0f} ms, its parts alone {total:.0f} ms: x{whole.ms / total:.3f}"
                )
    print(
        f"\n{'case':<5} {'ms':>8} {'tokens/s/GPU':>13} {'TFLOP/s':>8} {'MFU':>6} {'peak GB':>8} {'first s':>8}"
        f"   {'roofline':>15} {'Megatron-LM':>20} {'torchtitan':>11} {'bare step':>10} {'plain PyTorch':>16}"
    )
    for line in [row.text if row else "failed" for row in rows] + ratios:
        print(line)
    return 0 if all(rows) else 1


def measure(name: str, flags: list[str], arguments: argparse.Namespace) -> Measured | None:
    """Run a case; return its row of the table, or None if the run failed."""
    case = CASES[name]
    num_gpus = arguments.gpus or case.num_gpus
    limit = roofline_of(name, flags, world_size=num_gpus).tokens_per_second
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        iterations = arguments.iterations
        command = [
            *launcher(num_gpus),
            *(
                "pretrain.py",
                "--config",
                f"configs/benchmarks/{name.lower()}.yaml",
                "--metrics-file",
                str(metrics),
            ),
            *("--device", "cuda", "--train-iters", str(iterations + PROFILED * arguments.profile)),
            *(flags_of_sentences(Path(folder)) if case.has_sentences else ()),
            *flags,
        ]
        if arguments.profile:
            command += ["--profile", "--profile-step-start", str(iterations), "--profile-dir", folder]
            command += ["--profile-step-end", str(iterations + PROFILED)]
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
            return None
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    plain = plain_tokens_per_second(iterations) if case.has_plain_loop else None
    kept = [line for line in lines if "iteration_ms" in line][:iterations]
    text = f"{row(name, case, kept, first or 0.0, limit, plain)}   {shlex.join(flags)}".rstrip()
    return Measured(text, median_of(kept, "iteration_ms"))


def launcher(num_gpus: int) -> list[str]:
    """Return the command prefix that starts one rank per GPU; one rank needs no torchrun, which takes seconds."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_gpus)]
    return [sys.executable, *(ranks if num_gpus > 1 else ())]


def plain_tokens_per_second(iterations: int) -> float:
    """Run the plain loop on the GPU of the case; return its tokens per second."""
    command = [sys.executable, "scripts/benchmarks/plain_gpt2.py", "--iterations", str(iterations)]
    print("$", *command[1:], flush=True)
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(ended.stdout, ended.stderr[-2000:] if ended.returncode else "", flush=True)
    found = re.search(r"([\d,]+) tokens/s", ended.stdout)
    if ended.returncode or found is None:
        sys.exit(f"scripts/benchmarks/plain_gpt2.py: exit code {ended.returncode}")
    return float(found[1].replace(",", ""))


def median_of(lines: list[dict[str, Any]], key: str) -> float:
    """Return the median of a figure over all iterations but the first five."""
    return statistics.median(line[key] or 0.0 for line in lines[min(5, len(lines) - 1) :])


def row(
    name: str,
    case: Case,
    lines: list[dict[str, Any]],
    first_seconds: float,
    limit: float,
    plain: float | None = None,
) -> str:
    """Return a row of the table."""

    def median(key: str) -> float:
        return median_of(lines, key)

    speed, memory = (
        median("tokens_per_second_per_gpu"),
        max(line["max_memory_bytes"] or 0 for line in lines) / 1e9,
    )
    peers = (
        f"{limit:>8,.0f} {speed / limit:6.1%}",
        f"{case.megatron:>8,.0f} x{median('tflops_per_gpu') / case.megatron_tflops:5.3f} {case.megatron_gb:4.0f}G"
        if case.megatron
        else "-",
        f"{case.torchtitan:,.0f}" if case.torchtitan else "-",
        f"{case.bare:,.0f}" if case.bare else "-",
        f"{plain:,.0f} x{speed / plain:.3f}" if plain else "-",
    )
    return (
        f"{name:<5} {median('iteration_ms'):8.0f} {speed:13,.0f} {median('tflops_per_gpu'):8.1f} {median('mfu'):6.1%} "
        f"{memory:8.1f} {first_seconds:8.1f}"
        f"   {peers[0]:>15} {peers[1]:>20} {peers[2]:>11} {peers[3]:>10} {peers[4]:>16}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
