#!/usr/bin/env python3
"""Train a model on text, then quantize it, train it on with --qat, and distil and prune it; compare what each way keeps.

    python3 scripts/compare_post_training.py --output FOLDER --library /usr/lib/python3/dist-packages
    python3 scripts/compare_post_training.py --tiny --device cpu

    model ─┬─> quantize: fp8-channel, int4 by rounding, GPTQ, AWQ     perplexity of each export, from its own files
           ├─> --qat int4, the model as teacher ─> quantize           likewise
           └─> half of the layers: drawn, drawn with the teacher, pruned, pruned with the teacher; equal tokens

FOLDER has checkpoints, exports and metrics; what it has is not computed again. Exports are read without compressed-tensors: their
numbers times their scales become a folder of transformers without quantization; inputs in FP8 are rounded by --qat.
Prints a table last; the exit code is 1 if one of the comparisons of docs/post-training.md does not hold.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from compare_implementations import ROOT, prepare_data
from safetensors.torch import load_file, save_file

from megatrain.kernels.quantization.packing import unpack
from megatrain.kernels.quantization.rounding import dequantize
from megatrain.tools.quantization.plan import format_of

GROUP = 64
SIZES = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --num-query-groups 4 --ffn-hidden-size 1408 --seq-length 512"
    " --micro-batch-size 64 --global-batch-size 64 --bf16 --lr 2e-3 --min-lr 1e-4 --eval-iters 8"
).split()
TINY = "--lr 3e-3 --min-lr 1e-4 --eval-iters 4 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4".split()
DEFAULT, ROUNDED, FP8 = "int4-gptq", "int4-rtn", "fp8-channel-rtn"
EXPORTS = (FP8, ROUNDED, DEFAULT, "int4-awq")
"""Format and method of each export of the trained model."""


class Comparison:
    """The runs in a folder.

    Args:
        flags: of all runs.
        iterations: of the model; half as many train each smaller one, a fourth trains on with --qat.
    """

    def __init__(
        self, folder: Path, data: Sequence[str], flags: Sequence[str], iterations: int, device: str
    ) -> None:
        self.folder, self.iterations, self.device = folder, iterations, device
        self.flags = ["--config", "configs/quickstart.yaml", *data, *flags, "--device", device]
        self.data = data[-1]
        self.teacher = ["--export-kd-teacher-load", str(folder / "model")]

    def train(self, name: str, iterations: int, *flags: str) -> float:
        """Train; return the last validation loss."""
        folder, metrics = self.folder / name, self.folder / f"{name}.jsonl"
        length = [*("--train-iters", str(iterations)), *("--lr-warmup-iters", str(iterations // 10))]
        paths = ["--save", str(folder), "--load", str(folder), "--metrics-file", str(metrics)]
        every = ["--eval-interval", str(max(1, iterations // 4)), "--save-interval", str(iterations)]
        if not metrics.exists():
            self.call(name, "pretrain.py", *self.flags, *length, *every, *paths, *flags)
        return validation_loss(metrics)

    def evaluate(self, name: str, source: str, *flags: str) -> float:
        """Return the validation loss of a checkpoint, of the same samples for all."""
        name = f"{name}-evaluated"
        metrics = self.folder / f"{name}.jsonl"
        if not metrics.exists():
            paths = ["--load", "none", "--save", "none", "--pretrained-checkpoint", source]
            length = "--skip-train --train-iters 1 --lr-warmup-iters 0".split()
            self.call(
                name, "pretrain.py", *self.flags, *length, *paths, "--metrics-file", str(metrics), *flags
            )
        return validation_loss(metrics)

    def export(self, name: str, source: str) -> float:
        """Quantize a checkpoint of the folder, to `FORMAT-METHOD`; return the validation loss of the export."""
        form, _, method = name.rpartition("-")
        target = self.folder / f"{source}-{name}"
        groups = ["--group-size", str(GROUP)] if form == "int4" else []
        calibration = (
            [] if method == "rtn" else ["--calibration-data", self.data, "--calibration-samples", "256"]
        )
        if not target.exists():
            words = ["quantize", str(self.folder / source), str(target), "--format", form, "--method", method]
            self.tool(target.name, *words, *groups, *calibration, "--device", self.device)
        plain = dequantized(target, form, self.folder / f"{target.name}-plain")
        rounds_inputs = ["--qat", form] if form.startswith("fp8") else []
        return self.evaluate(target.name, f"hf:{plain}", *rounds_inputs)

    def with_qat(self) -> float:
        """Train the model on with rounded weights; return the validation loss of its export."""
        rate = ["--lr", "3e-4", "--min-lr", "0", "--qat", "int4", "--qat-group-size", str(GROUP)]
        start = ["--pretrained-checkpoint", str(self.folder / "model")]
        self.train("qat", self.iterations // 4, *start, *rate, *self.teacher)
        return self.export(ROUNDED, "qat")

    def prune(self, sizes: Sequence[str]) -> list[str]:
        """Prune the model; return the flags of a run that trains it on."""
        target = self.folder / "pruned"
        if not target.exists():
            source = ["--load", str(self.folder / "model"), "--data-path", self.data, "--samples", "64"]
            self.tool("pruned", "prune", *source, *sizes, "--device", self.device, "--save", str(target))
        return ["--pretrained-checkpoint", str(target)]

    def tool(self, name: str, *words: str) -> None:
        """Run a subcommand of megatrain."""
        self.call(name, "-m", "megatrain.tools.main", *words)

    def call(self, name: str, *words: str) -> None:
        """Run Python with its output in a file; exit with its code if it fails."""
        started = time.perf_counter()
        log = self.folder / f"{name}.log"
        with log.open("w", encoding="utf-8") as file:
            code = subprocess.run(
                [sys.executable, *words], cwd=ROOT, stdout=file, stderr=file, check=False
            ).returncode
        if code:
            print(f"{name}: exit code {code}\n{log.read_text()[-2000:]}", file=sys.stderr, flush=True)
            raise SystemExit(code)
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/post_training"))
    parser.add_argument("--library", type=Path, help="folder of *.py files [the standard library]")
    parser.add_argument("--limit-mb", type=float, default=32.0, help="megabytes of text [32]")
    parser.add_argument("--iterations", type=int, default=1000, help="iterations of the model [1000]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model and batches for a CPU")
    arguments, flags = parser.parse_known_args()
    folder = arguments.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    data = prepare_data(folder, limit_mb=arguments.limit_mb, library=arguments.library)
    sizes = TINY if arguments.tiny else SIZES
    runs = Comparison(folder, data, [*sizes, *flags], arguments.iterations, arguments.device)
    runs.train("model", arguments.iterations)
    half = arguments.iterations // 2
    smaller = ["--num-layers", "2" if arguments.tiny else "4"]
    teacher = [*runs.teacher, "--no-kd-skip-lm-loss"]
    with ThreadPoolExecutor(9 if arguments.device == "cuda" else 1) as pool:
        start = pool.submit(runs.prune, smaller)
        qat = pool.submit(runs.with_qat)
        drawn = pool.submit(runs.train, "drawn", half, *smaller)
        distilled = pool.submit(runs.train, "distilled", half, *smaller, *teacher)
        pruned = pool.submit(lambda: runs.train("healed", half, *smaller, *start.result()))
        exports = {name: pool.submit(runs.export, name, "model") for name in EXPORTS}
        healed = pool.submit(
            lambda: runs.train("healed-distilled", half, *smaller, *start.result(), *teacher)
        )
        exact = pool.submit(runs.evaluate, "model", str(folder / "model"))
    kept = {name: one.result() for name, one in exports.items()} | {"int4, --qat": qat.result()}
    students = {
        "drawn": drawn.result(),
        "drawn, teacher": distilled.result(),
        "pruned": pruned.result(),
        "pruned, teacher": healed.result(),
    }
    return report(exact.result(), kept, students)


def report(exact: float, kept: dict[str, float], students: dict[str, float]) -> int:
    """Print the table; return the exit code."""
    print(f"\n{'perplexity':<20} {math.exp(exact):9.4f}")
    changes = {name: math.exp(loss - exact) - 1 for name, loss in kept.items()}
    for name, change in changes.items():
        print(f"{name:<20} {math.exp(kept[name]):9.4f} {change:+9.3%}")
    print(f"\n{'half of the layers':<20} {'loss':>9}")
    for name, loss in students.items():
        print(f"{name:<20} {loss:9.4f}")
    calibrated = min(changes["int4-gptq"], changes["int4-awq"])
    checks = {
        "FP8 within 0.5 %": changes[FP8] <= 0.005,
        "INT4 (GPTQ or AWQ) within 3 %": calibrated <= 0.03,
        "INT4 (GPTQ or AWQ) better than rounding": calibrated < changes[ROUNDED],
        "--qat better than after training": changes["int4, --qat"] < calibrated,
        "distilled better than without": students["drawn, teacher"] < students["drawn"],
        "pruned better than drawn": students["pruned"] < students["drawn"],
    }
    for text, holds in checks.items():
        print(f"{'holds' if holds else 'FAILS'}   {text}")
    return int(not all(checks.values()))


def validation_loss(metrics: Path) -> float:
    """Return the last validation loss of a metrics file."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [row["loss"] for row in rows if "validation" in row]
    print(f"{metrics.stem}: validation losses {', '.join(f'{loss:.4f}' for loss in losses)}", flush=True)
    return float(losses[-1])


def dequantized(folder: Path, form: str, target: Path) -> Path:
    """Write an export again as a folder of transformers without quantization, unless it exists."""
    if target.exists():
        return target
    stored = {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}
    numbers = format_of(form, GROUP if form == "int4" else None, "rtn").weights
    for name in [name for name in stored if name.endswith("weight_scale")]:
        scale, weight = stored.pop(name), name.removesuffix("_scale")
        if (shape := stored.pop(f"{weight}_shape", None)) is None:
            values = stored.pop(weight)
        else:
            values = unpack(stored.pop(f"{weight}_packed"), numbers.num_bits, int(shape[1]))
        stored[weight] = dequantize(values.float(), scale.float(), numbers).to(scale.dtype)
    target.mkdir()
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    shutil.copy(folder / "tokenizer.json", target)
    return target


if __name__ == "__main__":
    raise SystemExit(main())
