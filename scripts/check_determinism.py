#!/usr/bin/env python3
"""Train the same thing twice with --deterministic-mode, in processes of their own, and compare all that is saved bit for bit.

    python3 scripts/check_determinism.py
    python3 scripts/check_determinism.py -- --config configs/benchmarks/a1.yaml --num-layers 4 --train-iters 8

Without a command line of its own: a small model in bf16 with all that a dense one may have whose sums could differ. A third run,
without the mode, shows what the mode costs. The exit code is 1 where a bit differs.
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
    parser.add_argument("flags", nargs="*", help="for pretrain.py, after --")
    flags = parser.parse_args().flags or SMALL.split()
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: Path(folder) / name for name in ("first", "second", "free")}
        for name, save in runs.items():
            mode = [] if name == "free" else ["--deterministic-mode"]
            command = [sys.executable, "pretrain.py", *flags, *mode, "--save", str(save)]
            ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if ended.returncode:
                sys.exit(f"$ {' '.join(command)}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}")
        differing = differences(runs["first"], runs["second"])
        with_mode, without = (milliseconds(runs[name]) for name in ("first", "free"))
    for name in differing:
        print(f"other bits: {name}")
    verdict = "the same bits" if not differing else f"{len(differing)} tensors or losses with other bits"
    print(
        f"two runs: {verdict}; {with_mode:.1f} ms an iteration, {without:.1f} ms without --deterministic-mode"
    )
    return 1 if differing else 0


def differences(one: Path, other: Path) -> list[str]:
    """Tensors and losses of two runs that are not the same."""
    found = [f"losses of iteration {a['iteration']}" for a, b in zip(lines_of(one), lines_of(other), strict=True)
             if any(a.get(key) != b.get(key) for key in ("lm_loss", "grad_norm", "loss"))]  # fmt: skip
    shards = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
    if not shards:
        sys.exit("the runs saved nothing to compare")
    for shard in shards:
        with safe_open(one / shard, framework="pt") as a, safe_open(other / shard, framework="pt") as b:
            found += [f"{shard}: {name}" for name in a.keys() if bits(a, name) != bits(b, name)]  # noqa: SIM118
    return found


def bits(shard: safe_open, name: str) -> bytes:
    return bytes(shard.get_tensor(name).flatten().view(torch.uint8).numpy())


def lines_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def milliseconds(run: Path) -> float:
    """Of an iteration, the median of the later half."""
    times = [line["iteration_ms"] for line in lines_of(run) if "iteration_ms" in line]
    return statistics.median(times[len(times) // 2 :])


if __name__ == "__main__":
    raise SystemExit(main())
