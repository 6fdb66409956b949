#!/usr/bin/env python3
"""Train twice with --deterministic-mode, in separate processes, and compare all saved tensors and losses bitwise.

    python3 scripts/check_determinism.py
    python3 scripts/check_determinism.py -- --config configs/benchmarks/a1.yaml --num-layers 4 --train-iters 8
    python3 scripts/check_determinism.py --second=--no-overlap-grad-reduce -- --config configs/benchmarks/a1.yaml --num-layers 4

By default a small dense model in bf16 is trained, with every feature whose sums could vary. A third run without the mode
measures the cost of the mode. --second gives the second run more flags, which must not change a bit, and replaces the third
run. The exit code is 1 if a bit differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from benchmark import launcher
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[1]
SMALL = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --group-query-attention --num-query-groups 2"
    " --ffn-hidden-size 1536 --normalization RMSNorm --swiglu --position-embedding-type rope --seq-length 1024 --mock-data"
    " --tokenizer-type NullTokenizer --vocab-size 4000 --micro-batch-size 4 --global-batch-size 16 --train-iters 12 --lr 1e-3"
    " --hidden-dropout 0.1 --attention-dropout 0 --bf16 --eval-iters 2 --log-interval 100 --reset-attention-mask"
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("flags", nargs="*", help="flags of pretrain.py, after --")
    parser.add_argument(
        "--second", default="", metavar="FLAGS", help="more flags of pretrain.py for the second run"
    )
    parser.add_argument("--gpus", type=int, default=1, help="GPUs to use")
    arguments = parser.parse_args()
    flags = arguments.flags or SMALL.split()
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: Path(folder) / name for name in ("first", "second")}
        if not arguments.second:
            runs["nondeterministic"] = Path(folder) / "nondeterministic"
        for name, save in runs.items():
            mode = [] if name == "nondeterministic" else ["--deterministic-mode"]
            more = arguments.second.split() if name == "second" else []
            command = [*launcher(arguments.gpus), "pretrain.py", *flags, *mode, *more, "--save", str(save)]
            result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if result.returncode:
                sys.exit(f"$ {' '.join(command)}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}")
        differing = differences(runs["first"], runs["second"])
        times = [f"{name} {milliseconds(run):.1f} ms" for name, run in runs.items()]
    for name in differing:
        print(f"different bits: {name}")
    verdict = "identical bits" if not differing else f"{len(differing)} tensors or losses with different bits"
    print(f"two runs: {verdict}; per iteration: {', '.join(times)}")
    return 1 if differing else 0


def differences(one: Path, other: Path) -> list[str]:
    """Return the names of tensors and losses that differ between two runs."""
    differing = [f"losses of iteration {a['iteration']}" for a, b in zip(lines_of(one), lines_of(other), strict=True)
             if any(a.get(key) != b.get(key) for key in ("lm_loss", "grad_norm", "loss"))]  # fmt: skip
    shards = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
    if not shards:
        sys.exit("the runs saved nothing to compare")
    for shard in shards:
        with safe_open(one / shard, framework="pt") as a, safe_open(other / shard, framework="pt") as b:
            differing += [f"{shard}: {name}" for name in a.keys() if bits(a, name) != bits(b, name)]  # noqa: SIM118
    return differing


def bits(shard: safe_open, name: str) -> bytes:
    return bytes(shard.get_tensor(name).flatten().view(torch.uint8).numpy())


def lines_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def milliseconds(run: Path) -> float:
    """Return the median iteration time over the later half of a run."""
    times = [line["iteration_ms"] for line in lines_of(run) if "iteration_ms" in line]
    return statistics.median(times[len(times) // 2 :])


if __name__ == "__main__":
    raise SystemExit(main())
