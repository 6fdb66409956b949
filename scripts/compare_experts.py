#!/usr/bin/env python3
"""Train a small mixture of experts and the dense model of equal active parameters on real text, 1,000 iterations on one GPU.

    python3 scripts/compare_experts.py [--output FOLDER] [flags of pretrain.py]

The models are those of configs/quickstart.yaml and configs/quickstart_moe.yaml; the text is the Python code of the installed
packages, 16,384 tokens per iteration. FOLDER/report.html shows both runs. Prints the validation losses and the largest expert
load of each layer relative to the mean.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compare_implementations import call, prepare_data

CONFIGS = ("quickstart", "quickstart_moe")
SETTINGS = "--micro-batch-size 64 --global-batch-size 64 --train-iters 1000 --eval-interval 200 --bf16"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/experts"))
    parser.add_argument("--limit-mb", type=float, default=72.0, help="megabytes of text [72]")
    arguments, flags = parser.parse_known_args()
    folder = arguments.output.resolve()
    packages = Path(sysconfig.get_paths()["purelib"])
    data = prepare_data(folder, limit_mb=arguments.limit_mb, library=packages)
    for name in CONFIGS:
        shutil.rmtree(folder / name, ignore_errors=True)
        folders = ["--save", str(folder / name), "--load", str(folder / name)]
        call("pretrain.py", "--config", f"configs/{name}.yaml", *data, *SETTINGS.split(), *folders, *flags)
    page = str(folder / "report.html")
    call("-m", "megatrain.tools.main", "report", *(str(folder / name) for name in CONFIGS), "--output", page)
    for name in CONFIGS:
        print(f"{name}: {summary(folder / name / 'metrics.jsonl')}")
    return 0


def summary(metrics: Path) -> str:
    """Return the validation losses and the expert loads after the first fifth of the run."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    found = [f"{row['loss']:.3f} at {row['iteration']}" for row in rows if "validation" in row]
    steps = [row["routers"]["layers"] for row in rows if row.get("routers")]
    return f"validation loss {', '.join(found)}{loads(steps[len(steps) // 5 :]) if steps else ''}"


def loads(steps: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Return the mean over steps of the largest load of each layer, and the maximum."""
    by_layer = [[layer["max_load"] for layer in of_layer] for of_layer in zip(*steps, strict=True)]
    means = ", ".join(f"{statistics.fmean(values):.2f}" for values in by_layer)
    return f"; largest load per layer {means} times the mean, maximum {max(map(max, by_layer)):.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
