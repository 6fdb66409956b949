#!/usr/bin/env python3
"""The same training with the layers of each implementation: case A1 with 4 layers on the text of Python's standard library.

    python3 scripts/compare_implementations.py [--output FOLDER] [--implementations local transformer_engine] [flags of pretrain.py]

Text, tokenizer and data are made in FOLDER, once. Each implementation trains 200 iterations from the same initial weights;
FOLDER/local.jsonl and its like hold the metrics, FOLDER/report.html their curves on top of each other. Prints how far the
losses of the others are from those of the first. Flags behind these change the runs, such as --train-iters 20.
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
ROWS_OF_A1 = 128256
"""Of its embedding, whatever the tokenizer has."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/implementations"))
    parser.add_argument("--implementations", nargs="+", default=["local", "transformer_engine"])
    parser.add_argument("--limit-mb", type=float, default=32.0, help="of text [32]")
    arguments, flags = parser.parse_known_args()
    folder = arguments.output.resolve()
    data = made_data(folder, limit_mb=arguments.limit_mb)
    files = [trained(folder, name, [*data, *flags]) for name in arguments.implementations]
    call("-m", "megatrain.tools.main", "report", *map(str, files), "--output", str(folder / "report.html"))
    losses = [losses_of(file) for file in files]
    for name, found in zip(arguments.implementations[1:], losses[1:], strict=True):
        print(distance(name, found, arguments.implementations[0], losses[0]))
    return 0


def made_data(folder: Path, *, limit_mb: float, library: Path | None = None) -> list[str]:
    """Flags of the data, which is made where it is not there yet: of Python's standard library, or of another folder."""
    corpus, tokenizer, prefix = folder / "corpus.jsonl", folder / "tokenizer.json", folder / "stdlib"
    kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    if not corpus.exists():
        sources = [] if library is None else ["--folder", str(library)]
        call("scripts/quickstart/corpus.py", "--output", str(corpus), "--limit-mb", str(limit_mb), *sources)
    if not tokenizer.exists():
        call("scripts/quickstart/tokenizer.py", "--input", str(corpus), "--output", str(tokenizer))
    if not Path(f"{prefix}_text_document.idx").exists():
        output = ["--json-keys", "text", "--append-eod", "--workers", "2", "--output-prefix", str(prefix)]
        call("preprocess_data.py", "--input", str(corpus), *kind, *output)
    return [*kind, "--data-path", f"{prefix}_text_document"]


def trained(folder: Path, implementation: str, flags: Sequence[str]) -> Path:
    """Train with an implementation; its metrics."""
    metrics = folder / f"{implementation}.jsonl"
    metrics.unlink(missing_ok=True)
    call(
        "pretrain.py",
        *("--config", "configs/benchmarks/a1.yaml", "--no-mock-data", "--vocab-size", "none"),
        *("--padded-vocab-size", str(ROWS_OF_A1), "--metrics-file", str(metrics)),
        *("--transformer-impl", implementation, *SETTINGS.split(), *flags),
    )
    return metrics


def losses_of(metrics: Path) -> list[float]:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [row["lm_loss"] for row in rows if "lm_loss" in row]


def distance(name: str, losses: Sequence[float], usual_name: str, usual: Sequence[float]) -> str:
    """How far a curve is from the usual one."""
    apart = [abs(a - b) / b for a, b in zip(losses, usual, strict=True)]
    furthest = max(range(len(apart)), key=apart.__getitem__)
    return (
        f"{name} against {usual_name}: first loss {losses[0]:.4f} and {usual[0]:.4f}, last {losses[-1]:.4f} and {usual[-1]:.4f};"
        f" furthest apart at iteration {furthest + 1}, by {apart[furthest]:.2%}; on average {sum(apart) / len(apart):.3%}"
    )


def call(*command: str) -> None:
    """Run a Python command of the repository; this ends where that fails."""
    print("$ python3", *command, flush=True)
    code = subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    raise SystemExit(main())
