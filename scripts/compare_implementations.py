#!/usr/bin/env python3
"""Train the same model with each implementation: case A1 with 4 layers on the text of Python's standard library.

    python3 scripts/compare_implementations.py [--output FOLDER] [--implementations local transformer_engine] [flags of pretrain.py]

Text, tokenizer and data files are created in FOLDER once. Each implementation trains 200 iterations from the same initial
weights; FOLDER/<implementation>.jsonl contains the metrics, FOLDER/report.html the curves. Prints the differences of the losses
from those of the first implementation. Further flags are passed to pretrain.py, such as --train-iters 20.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = "--split 100,0,0 --num-layers 4 --train-iters 200 --lr-warmup-fraction 0.1 --lr-decay-style cosine --min-lr 1e-5 --eval-iters 0"
EMBEDDING_ROWS = 128256
"""Rows of the embedding, independent of the tokenizer."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/implementations"))
    parser.add_argument("--implementations", nargs="+", default=["local", "transformer_engine"])
    parser.add_argument("--limit-mb", type=float, default=32.0, help="megabytes of text [32]")
    arguments, flags = parser.parse_known_args()
    folder = arguments.output.resolve()
    data = prepare_data(folder, limit_mb=arguments.limit_mb)
    files = [train(folder, name, [*data, *flags]) for name in arguments.implementations]
    call("-m", "megatrain.tools.main", "report", *map(str, files), "--output", str(folder / "report.html"))
    losses = [losses_of(file) for file in files]
    for name, found in zip(arguments.implementations[1:], losses[1:], strict=True):
        print(distance(name, found, arguments.implementations[0], losses[0]))
    return 0


def prepare_data(folder: Path, *, limit_mb: float, library: Path | None = None) -> list[str]:
    """Create the data files that are missing, from the standard library or another folder; return their flags."""
    corpus, tokenizer, prefix = folder / "corpus.jsonl", folder / "tokenizer.json", folder / "stdlib"
    kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    if not corpus.exists():
        sources = [] if library is None else ["--folder", str(library)]
        call("scripts/quickstart/corpus.py", "--output", str(corpus), "--limit-mb", str(limit_mb), *sources)
    if not tokenizer.exists():
        words = ["--input", str(corpus), "--output", str(folder), "--vocab-size", "4096"]
        call("-m", "megatrain.tools.main", "tokenizer", "train", *words)
    if not Path(f"{prefix}_text_document.idx").exists():
        output = ["--json-keys", "text", "--append-eod", "--workers", "2", "--output-prefix", str(prefix)]
        call("preprocess_data.py", "--input", str(corpus), *kind, *output)
    return [*kind, "--data-path", f"{prefix}_text_document"]


def train(folder: Path, implementation: str, flags: Sequence[str]) -> Path:
    """Train with an implementation; return its metrics file."""
    metrics = folder / f"{implementation}.jsonl"
    metrics.unlink(missing_ok=True)
    call(
        "pretrain.py",
        *("--config", "configs/benchmarks/a1.yaml", "--no-mock-data", "--vocab-size", "none"),
        *("--padded-vocab-size", str(EMBEDDING_ROWS), "--metrics-file", str(metrics)),
        *("--transformer-impl", implementation, *SETTINGS.split(), *flags),
    )
    return metrics


def losses_of(metrics: Path) -> list[float]:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [row["lm_loss"] for row in rows if "lm_loss" in row]


def distance(name: str, losses: Sequence[float], reference_name: str, reference: Sequence[float]) -> str:
    """Return a sentence on the differences of a loss curve from the reference."""
    differences = [abs(a - b) / b for a, b in zip(losses, reference, strict=True)]
    largest = max(range(len(differences)), key=differences.__getitem__)
    return (
        f"{name} and {reference_name}: first loss {losses[0]:.4f} and {reference[0]:.4f}, last {losses[-1]:.4f} and {reference[-1]:.4f};"
        f" largest difference {differences[largest]:.2%} at iteration {largest + 1}; mean difference {sum(differences) / len(differences):.3%}"
    )


def call(*command: str) -> None:
    """Run a Python command of the repository; exit with its code if it fails."""
    print("$ python3", *command, flush=True)
    code = subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    raise SystemExit(main())
