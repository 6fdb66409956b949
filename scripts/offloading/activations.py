"""Time steps with activations in host memory, and compare their peak memory with the plan's, on one GPU.

    python scripts/offloading/activations.py                        8 layers of case A1
    python scripts/offloading/activations.py --tiny                 on a CPU, a tiny model
    python scripts/offloading/activations.py --rows none layers4    some rows
    python scripts/offloading/activations.py -- --num-layers 16     flags of pretrain.py

Each row is an engine of its own, and trains the same micro-batches. `slower` compares its median step with that of the last row without
offloading and with the same recomputation; `loss` is the largest difference from the losses of that row.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch

from megatrain.config import Plan, parse
from megatrain.parallel.batch import Batch
from megatrain.training.build import build_schedules
from megatrain.training.engine import Engine
from megatrain.training.launch.ranks import Ranks, joined_ranks, report_errors
from megatrain.training.planning.memory_plan import StageMemory, planned_rank_memory

CASE = Path(__file__).parents[2] / "configs" / "benchmarks" / "a1.yaml"
COMMON = "--num-layers 8 --cuda-graph-impl none --num-workers 0"
TINY = "--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 --vocab-size 301 --device cpu --seq-length 128"
_MODULES = "--fine-grained-activation-offloading --offload-modules"
_UNIFORM = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_TE = "--transformer-impl transformer_engine"
ROWS = {
    "none": "",
    "attention": f"{_MODULES} core_attn attn_proj",
    "attention+norms": f"{_MODULES} attn_norm core_attn attn_proj mlp_norm",
    "layers2": "--cpu-offloading-num-layers 2",
    "layers4": "--cpu-offloading-num-layers 4",
    "layers8": "--cpu-offloading-num-layers 8",
    "none uniform": _UNIFORM,
    "inputs uniform": f"{_UNIFORM} {_MODULES} layer_input",
    "none TE": _TE,
    "attention TE": f"{_TE} {_MODULES} core_attn attn_proj",
    "layers2 TE": f"{_TE} --cpu-offloading-num-layers 2",
}


class Measured(NamedTuple):
    """The steps of a row."""

    milliseconds: float
    peak_bytes: int
    planned: StageMemory
    host_bytes: int
    losses: list[float]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each row, after two more")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no row after so many seconds")
    parser.add_argument("flags", nargs="*", help="further flags of pretrain.py, after --")
    options = parser.parse_args()
    begin, baselines = time.perf_counter(), dict[str, Measured]()
    print(
        "row                  ms  slower  peak GB  planned  on host  planned   loss  difference", flush=True
    )
    for name in options.rows:
        if time.perf_counter() - begin > options.seconds:
            print(f"{name:<18} not started: {options.seconds:.0f} s are over")
            continue
        words = f"--config {CASE} {COMMON} {TINY if options.tiny else ''} {ROWS[name]}".split()
        found: list[Measured] = []

        def run(words: list[str] = words, found: list[Measured] = found) -> int:
            with joined_ranks(parse([*words, *options.flags])) as ranks:
                found.append(measure(ranks, options.steps))
            return 0

        if report_errors(run):
            return 1
        kind = name.partition(" ")[2]
        if name.startswith("none"):
            baselines[kind] = found[0]
        print_row(name, found[0], baselines.get(kind, found[0]))
    print(f"{time.perf_counter() - begin:.0f} s")
    return 0


def measure(ranks: Ranks, steps: int) -> Measured:
    """Train an engine of its own, and return what its steps took."""
    plan, device = ranks.plan, ranks.device
    planned = planned_rank_memory(plan, ranks.grid)
    engine = Engine(plan, ranks.grid, device)
    engine.initialize()
    batches, hyperparams = micro_batches(plan, device), build_schedules(plan).at(0)
    seconds, losses, is_gpu = [], [], device.type == "cuda"
    for step in range(2 + steps):
        if is_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        losses.append(engine.step(batches, hyperparams).lm_loss)
        if is_gpu:
            torch.cuda.synchronize()
        if step >= 2:
            seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if is_gpu else 0
    buffers = getattr(engine.executor.hooks, "buffers", None)
    host_bytes = getattr(buffers, "num_bytes", 0) if plan.config.training.offloads_activations else 0
    del engine, buffers
    gc.collect()
    if is_gpu:
        torch.cuda.empty_cache()
    return Measured(1e3 * statistics.median(seconds), peak, planned, host_bytes, losses)


def micro_batches(plan: Plan, device: torch.device) -> list[Batch]:
    """Return micro-batches of random tokens, the same for each row."""
    shape = plan.config.training.micro_batch_size, plan.config.data.seq_length
    generator = torch.Generator().manual_seed(1)
    positions = torch.arange(shape[1]).expand(shape)
    found = []
    for _ in range(plan.derived.num_microbatches):
        tokens = torch.randint(0, plan.derived.vocab_size, (shape[0], shape[1] + 1), generator=generator)
        batch = Batch(
            tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.ones(shape), position_ids=positions
        )
        found.append(batch.mapped(lambda x: x.contiguous().to(device)))
    return [dataclasses.replace(batch) for batch in found]


def print_row(name: str, row: Measured, baseline: Measured) -> None:
    difference = max(abs(a - b) for a, b in zip(row.losses, baseline.losses, strict=True))
    print(
        f"{name:<18}{row.milliseconds:>5.0f}{row.milliseconds / baseline.milliseconds - 1:>8.1%}"
        f"{row.peak_bytes / 1e9:>9.2f}{row.planned.total / 1e9:>9.2f}{row.host_bytes / 1e9:>9.2f}"
        f"{row.planned.activations_on_host / 1e9:>9.2f}{row.losses[-1]:>8.4f}{difference:>10.1e}",
        flush=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
