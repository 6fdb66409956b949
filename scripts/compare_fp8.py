#!/usr/bin/env python3
"""Train case A1 with 4 layers on text in bf16 and in FP8, with each implementation; compare the losses with those of bf16.

    python3 scripts/compare_fp8.py [--output FOLDER] [--gpus 0 1] [--runs "local delayed"] [flags of pretrain.py]
    python3 scripts/compare_fp8.py --output FOLDER --only-compare --plot docs/images/fp8.svg

300 iterations of two sequences of 8,192 tokens, from the same initial weights and in the same order; each GPU runs one at a time.
FOLDER has the metrics and the output of each run; runs that it has are not trained again. Two runs of the same command differ, since
the order of some sums does: with --repeats N, losses are means of N runs. Prints a table last; the exit code is 1 if the mean training
loss of the last 50 iterations, or the final validation loss, differs from that of bf16 by more than 1 % in any kind of run, or a run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from compare_implementations import EMBEDDING_ROWS, ROOT, SETTINGS, losses_of, prepare_data

RUNS = (
    "local bf16",
    "transformer_engine bf16",
    "local delayed",
    "transformer_engine delayed",
    "local tensorwise",
    "transformer_engine tensorwise",
    "local blockwise",
    "transformer_engine blockwise",
)
"""Implementation, and recipe of --fp8-format hybrid."""
BF16 = RUNS[0]
LAST = 50
"""Iterations whose mean training loss is compared."""
TRAINING = "--train-iters 300 --global-batch-size 2 --split 90,10,0 --eval-interval 300 --eval-iters 16 --eval-global-batch-size 2"
LIMIT = 0.01
COLORS = ("black", "#888888", "#1f77b4", "#17becf", "#2ca02c", "#bcbd22", "#d62728", "#9467bd")


@dataclass(frozen=True)
class Curve:
    """Means over the repeated runs of a kind: training losses, final validation loss, median time of an iteration."""

    name: str
    losses: list[float]
    validation: float
    milliseconds: float
    each: list[float]
    """Mean training loss of the last iterations of each run."""

    @property
    def last(self) -> float:
        """Mean training loss of the last iterations."""
        return statistics.mean(self.losses[-LAST:])

    @property
    def spread(self) -> str:
        """Difference of the runs from one another."""
        return f"{max(self.each) / min(self.each) - 1:.2%}" if len(self.each) > 1 else ""

    def differences(self, reference: Curve) -> tuple[float, float]:
        """Return the relative differences of mean training loss and validation loss."""
        return self.last / reference.last - 1, self.validation / reference.validation - 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/fp8"))
    parser.add_argument("--gpus", nargs="+", default=["0"], help="numbers of the GPUs [0]")
    parser.add_argument(
        "--runs", nargs="+", choices=RUNS, default=RUNS, metavar="RUN", help="runs to train [all]"
    )
    parser.add_argument("--repeats", type=int, default=1, help="runs of each kind [1]")
    parser.add_argument("--limit-mb", type=float, default=16.0, help="megabytes of text [16]")
    parser.add_argument(
        "--only-compare", action="store_true", help="train nothing; compare the runs in FOLDER"
    )
    parser.add_argument("--plot", type=Path, help="SVG file to draw [FOLDER/fp8.svg]")
    arguments, flags = parser.parse_known_args()
    folder = arguments.output.resolve()
    num_failed = 0
    if not arguments.only_compare:
        data = prepare_data(folder, limit_mb=arguments.limit_mb)
        numbers = range(1, arguments.repeats + 1)
        files = [(name, file_of(folder, name, number)) for number in numbers for name in arguments.runs]
        num_failed = train_all(files, arguments.gpus, [*data, *flags])
    found = {name: sorted(folder.glob(file_of(folder, name, "*").name)) for name in RUNS}
    curves = [curve_of(name, files) for name, files in found.items() if files]
    if not curves or curves[0].name != BF16:
        sys.exit(f"{folder} has no run of {BF16}, with which the others are compared")
    (arguments.plot or folder / "fp8.svg").write_text(plot(curves), encoding="utf-8")
    print(table(curves))
    shares = [share for curve in curves for share in curve.differences(curves[0])]
    return int(num_failed > 0 or not all(abs(share) <= LIMIT for share in shares))  # NaN is above the limit


def train_all(files: Sequence[tuple[str, Path]], gpus: Sequence[str], flags: Sequence[str]) -> int:
    """Run those that have no metrics file, one per GPU at a time; return how many failed."""
    free: queue.Queue[str] = queue.Queue()
    for gpu in gpus:
        free.put(gpu)
    missing = [(name, metrics) for name, metrics in files if not metrics.exists()]
    with ThreadPoolExecutor(len(gpus)) as pool:
        codes = list(pool.map(lambda one: train(*one, free, flags), missing))
    for (name, metrics), code in zip(missing, codes, strict=True):
        if code:
            print(f"{name} failed: {metrics.with_suffix('.log')}", file=sys.stderr)
    return sum(code != 0 for code in codes)


def train(name: str, metrics: Path, free: queue.Queue[str], flags: Sequence[str]) -> int:
    """Train on a GPU that is free; the metrics file appears when the run has ended well."""
    implementation, recipe = name.split()
    fp8 = [] if recipe == "bf16" else ["--fp8-format", "hybrid", "--fp8-recipe", recipe]
    part = metrics.with_suffix(".part")
    part.unlink(missing_ok=True)
    command = [
        *("pretrain.py", "--config", "configs/benchmarks/a1.yaml", "--no-mock-data", "--vocab-size", "none"),
        *("--padded-vocab-size", str(EMBEDDING_ROWS), "--metrics-file", str(part)),
        *("--transformer-impl", implementation, *SETTINGS.split(), *TRAINING.split(), *fp8, *flags),
    ]
    gpu = free.get()
    print(f"GPU {gpu}: {name}", flush=True)
    with metrics.with_suffix(".log").open("w", encoding="utf-8") as log:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
        code = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=log, stderr=log, check=False
        ).returncode
    free.put(gpu)
    if code == 0:
        part.rename(metrics)
    return code


def file_of(folder: Path, name: str, number: int | str) -> Path:
    return folder / f"{name.replace(' ', '-')}-{number}.jsonl"


def curve_of(name: str, files: Sequence[Path]) -> Curve:
    validations, milliseconds = [], []
    for file in files:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        times = [row["iteration_ms"] for row in rows if "iteration_ms" in row]
        milliseconds.append(statistics.median(times[len(times) // 2 :]))
        validations.append([row["loss"] for row in rows if "validation" in row][-1])
    runs = [losses_of(file) for file in files]
    return Curve(
        name,
        [statistics.mean(losses) for losses in zip(*runs, strict=True)],
        statistics.mean(validations),
        statistics.mean(milliseconds),
        [statistics.mean(losses[-LAST:]) for losses in runs],
    )


def table(curves: Sequence[Curve]) -> str:
    """Return the table as Markdown; the first curve is the reference."""
    lines = [
        f"| run | runs | training loss, mean of the last {LAST} | between runs | difference to `{curves[0].name}` | validation loss | difference | ms an iteration |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for curve in curves:
        training, validation = (
            f"{share:+.2%}{'' if abs(share) <= LIMIT else f', above {LIMIT:.0%}'}"
            for share in curve.differences(curves[0])
        )
        lines.append(
            f"| `{curve.name}` | {len(curve.each)} | {curve.last:.4f} | {curve.spread} | {training} | {curve.validation:.4f} | {validation} | {curve.milliseconds:.1f} |"
        )
    return "\n".join(lines)


def plot(curves: Sequence[Curve]) -> str:
    """Return an SVG with the losses, and below them their differences to the first curve, smoothed."""
    smooth = [smoothed(curve.losses) for curve in curves]
    shares = [[100 * (a / b - 1) for a, b in zip(one, smooth[0], strict=False)] for one in smooth]
    low, high = min(map(min, smooth)), max(one[0] for one in smooth)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 520" font-family="sans-serif" font-size="12">',
        '<rect width="780" height="520" fill="white"/>',
        *panel("training loss, nats a token", smooth, (low, high), 40),
        *panel(f"difference to {curves[0].name}, %", shares, (-2.0, 2.0), 290),
    ]
    for number, (curve, color) in enumerate(zip(curves, COLORS, strict=False)):
        y = 60 + 17 * number
        parts.append(f'<line x1="560" y1="{y - 4}" x2="580" y2="{y - 4}" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="586" y="{y}">{curve.name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def panel(title: str, lines: Sequence[Sequence[float]], limits: tuple[float, float], top: int) -> list[str]:
    """Return the elements of a panel: a frame with four rules, and a line per curve."""
    left, width, height = 50, 700, 190
    low, high = limits
    parts = [f'<text x="{left}" y="{top - 8}" font-size="13">{title}</text>']
    for step in range(5):
        value, y = low + (high - low) * step / 4, top + height * (1 - step / 4)
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.1f}</text>')
    for line, color in zip(lines, COLORS, strict=False):
        points = [
            (
                left + width * n / max(1, len(line) - 1),
                top + height * (high - min(max(y, low), high)) / (high - low),
            )
            for n, y in enumerate(line)
        ]
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{text}" fill="none" stroke="{color}" stroke-width="1.3"/>')
    for step in range(4):
        number = round(max(map(len, lines)) * step / 3)
        x = left + width * step / 3
        parts.append(f'<text x="{x:.1f}" y="{top + height + 16}" text-anchor="middle">{number}</text>')
    return parts


def smoothed(losses: Sequence[float], length: int = 20) -> list[float]:
    """Return the means of up to `length` losses before and at each iteration."""
    return [statistics.mean(losses[max(0, n + 1 - length) : n + 1]) for n in range(len(losses))]


if __name__ == "__main__":
    raise SystemExit(main())
