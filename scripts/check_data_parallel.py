"""Trains a small model in bf16 with each way of data parallelism, on the GPUs of one host, and compares them.

    python -m torch.distributed.run --nproc-per-node 2 scripts/check_data_parallel.py       4: instances and stages too

Overlap must change no bit of losses, norms and main weights. Other ways sum in other orders: their losses may differ by
four times what half the micro-batch alone makes. What is spread over more must take less memory. Exit code 1 if not so.
With `--device cpu` the same runs over gloo with a tiny model, without memory and communication times.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatrain.parallel.build_grid import build_grid
from megatrain.config import Facts, parse, resolve
from megatrain.parallel.batch import Batch
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.rank_lists import GridShape
from megatrain.parallel.process_groups import make_group
from megatrain.training.debugging.trace_summary import summarize
from megatrain.training.engine import Engine
from megatrain.training.launch.ranks import grid_shape
from megatrain.training.build import build_schedules

NUM_STEPS, NUM_PROFILED = 20, 3
GLOBAL_BATCH = 32
SIZES = {
    "cuda": "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --ffn-hidden-size 4096 --seq-length 512 --vocab-size 32000",
    "cpu": "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 32 --vocab-size 501",
}
COMMON = (
    "--normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 "
    "--attention-dropout 0 --attention-backend math --untie-embeddings-and-output-weights --mock-data "
    f"--tokenizer-type NullTokenizer --global-batch-size {GLOBAL_BATCH} --train-iters 20 --lr 1e-3 --bf16"
)
STRATEGY = "--data-parallel-sharding-strategy"
NO_OVERLAP = "--no-overlap-grad-reduce --no-overlap-param-gather"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
INSTANCES = "--num-distributed-optimizer-instances 2"


@dataclass(frozen=True)
class Way:
    """One way of data parallelism."""

    name: str
    flags: str
    twin: str | None = None
    """The way that must give the same bits."""
    smaller_than: str | None = None
    """The way that must take more memory."""
    num_ranks: int = 2
    micro_batch: int = 4
    band: int = 4
    """How many times the noise its losses may differ by."""


WAYS = (
    Way("ZeRO-1", ""),
    Way("ZeRO-1 again", "", twin="ZeRO-1"),
    Way("ZeRO-1, micro-batch 2", "", micro_batch=2),
    Way("ZeRO-1, no overlap", NO_OVERLAP, twin="ZeRO-1"),
    Way("ZeRO-0", f"{STRATEGY} no_shard"),
    Way("ZeRO-0, no overlap", f"{STRATEGY} no_shard {NO_OVERLAP}", twin="ZeRO-0"),
    Way("ZeRO-2", f"{STRATEGY} optim_grads", smaller_than="ZeRO-1"),
    Way("ZeRO-2, no overlap", f"{STRATEGY} optim_grads {NO_OVERLAP}", twin="ZeRO-2"),
    Way("ZeRO-3", f"{STRATEGY} optim_grads_params", smaller_than="ZeRO-2"),
    Way("ZeRO-3, no overlap", f"{STRATEGY} optim_grads_params {NO_OVERLAP}", twin="ZeRO-3"),
    Way("ZeRO-3, recomputed", f"{STRATEGY} optim_grads_params {RECOMPUTE}"),
    Way(
        "ZeRO-1, sums in bf16", "--grad-reduce-in-bf16", band=40
    ),  # each rank's gradients are rounded to 8 bits
    Way("ZeRO-1, 2 instances", INSTANCES, num_ranks=4),
    Way("ZeRO-3, 2 instances", f"{STRATEGY} optim_grads_params {INSTANCES}", num_ranks=4),
    Way("ZeRO-3, 2 stages", f"{STRATEGY} optim_grads_params --pipeline-model-parallel-size 2", num_ranks=4),
)
"""The third one measures what another order of sums makes."""
NOISE = WAYS[2].name


@dataclass(frozen=True)
class Found:
    """What the ranks found of a way."""

    losses: list[float]
    norms: list[float]
    marks: list[str]
    """Of each rank's main weights after the last step."""
    milliseconds: float
    gigabytes: float
    exposed: float | None
    """Share of a step in which rank 0's GPU communicates and computes nothing."""

    @property
    def bits(self) -> tuple[Any, ...]:
        return self.losses, self.norms, self.marks

    def difference(self, other: Found) -> float:
        """Largest relative difference of losses."""
        return max(abs(a - b) / abs(b) for a, b in zip(self.losses, other.losses, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    name = parser.parse_args().device
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(name, int(os.environ["LOCAL_RANK"])) if name == "cuda" else torch.device("cpu")
    if name == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True, warn_only=True)  # sums of the embedding's gradient, most of all
    torch.utils.deterministic.fill_uninitialized_memory = False
    dist.init_process_group(
        "nccl" if name == "cuda" else "gloo", device_id=device if name == "cuda" else None
    )
    grids: dict[GridShape, RankGrid] = {}
    found: dict[str, Found] = {}
    problems: list[str] = []
    if rank == 0:
        print(
            f"{world_size} ranks, {NUM_STEPS} steps in bf16; losses against ZeRO-1's; memory and exposed communication of rank 0"
        )
        print(f"{'':24} {'last loss':>9}  difference  bits   ms a step      GB  exposed", flush=True)
    for way in (way for way in WAYS if way.num_ranks <= world_size):
        found[way.name] = run(way, world_size, rank, device, grids)
        problems += judged(way, found, is_memory_known=name == "cuda")
        if rank == 0:
            print(row(way, found), flush=True)
    if rank == 0:
        print("\n".join(problems) or "all as it should be")
    dist.barrier()
    dist.destroy_process_group()
    return 1 if problems else 0


def run(
    way: Way, world_size: int, rank: int, device: torch.device, grids: dict[GridShape, RankGrid]
) -> Found:
    """Train with it."""
    flags = f"{SIZES[device.type]} {COMMON} --micro-batch-size {way.micro_batch} --device {device.type} {way.flags}"
    request = parse(flags.split())
    plan = resolve(request, Facts(world_size=world_size, device=device.type))  # type: ignore[arg-type]
    shape = grid_shape(plan)
    if shape not in grids:
        grids[shape] = build_grid(shape, rank, make_group)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    engine = Engine(plan, grids[shape], device)
    engine.initialize()
    rates = build_schedules(plan).at(0)
    vocab, length = plan.derived.vocab_size, plan.config.data.seq_length
    losses, norms, milliseconds = [], [], []
    for step in range(NUM_STEPS):
        batches = batches_of(step, engine, vocab, length, way.micro_batch)
        began = time.perf_counter()
        report = engine.step(batches, rates, first_sample=step * GLOBAL_BATCH)
        milliseconds.append(1000 * (time.perf_counter() - began))
        losses.append(report.lm_loss)
        norms.append(report.grad_norm)
    marks: list[Any] = [None] * world_size
    dist.all_gather_object(marks, mark(engine))
    used = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    exposed = None
    if device.type == "cuda":
        steps = [batches_of(step, engine, vocab, length, way.micro_batch) for step in range(NUM_PROFILED)]
        exposed = exposed_share(engine, steps, is_watched=rank == 0)
    engine.data_parallel.wait_for_weights()
    del engine
    gc.collect()
    return Found(losses, norms, marks, statistics.median(milliseconds[3:]), used, exposed)


def batches_of(step: int, engine: Engine, vocab: int, length: int, micro_batch: int) -> list[Batch]:
    """This replica's micro-batches: progressions of ids, whose step a model learns to see."""
    dp = engine.grid.dp
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(vocab, (GLOBAL_BATCH, 1), generator=generator)
    stride = torch.randint(1, 9, (GLOBAL_BATCH, 1), generator=generator)
    ids = ((first + stride * torch.arange(length + 1)) % vocab).to(engine.device)
    places = torch.arange(length, device=engine.device).expand(micro_batch, -1)
    batches = []
    for start in range(dp.rank * micro_batch, GLOBAL_BATCH, dp.size * micro_batch):
        rows = ids[start : start + micro_batch]
        ones = torch.ones(micro_batch, length, device=engine.device)
        batches.append(
            Batch(
                tokens=rows[:, :-1].contiguous(),
                labels=rows[:, 1:].contiguous(),
                loss_mask=ones,
                position_ids=places,
            )
        )
    return batches


def mark(engine: Engine) -> str:
    """Of the main weights that this rank owns."""
    digest = hashlib.blake2b(digest_size=8)
    for flat in engine.optimizer.state("weight"):
        digest.update(flat.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def exposed_share(engine: Engine, steps: list[list[Batch]], *, is_watched: bool) -> float | None:
    """Of a few more steps, all ranks'; profiled on one."""
    rates = build_schedules(engine.plan).at(0)
    torch.cuda.synchronize()
    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) if is_watched else None
    if profiler is not None:
        profiler.start()
    for batches in steps:
        engine.step(batches, rates)
    torch.cuda.synchronize()
    if profiler is None:
        return None
    profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        parts = summarize(json.loads(path.read_text())["traceEvents"], num_steps=len(steps)).parts.values()
    return sum(part.exposed for part in parts) / sum(part.total for part in parts)


def judged(way: Way, found: dict[str, Found], *, is_memory_known: bool) -> list[str]:
    """What is not as it should be."""
    own, problems = found[way.name], []
    if way.twin is not None and own.bits != found[way.twin].bits:
        problems.append(f"{way.name}: not the same bits as {way.twin}")
    if NOISE in found:
        difference, noise = own.difference(found["ZeRO-1"]), found[NOISE].difference(found["ZeRO-1"])
        if not difference <= way.band * noise:
            problems.append(
                f"{way.name}: losses differ by {difference:.1e}, and another order of sums makes {noise:.1e}"
            )
    if (
        is_memory_known
        and way.smaller_than is not None
        and own.gigabytes >= found[way.smaller_than].gigabytes
    ):
        problems.append(f"{way.name}: takes no less memory than {way.smaller_than}")
    return problems


def row(way: Way, found: dict[str, Found]) -> str:
    own = found[way.name]
    bits = "" if way.twin is None else "same" if own.bits == found[way.twin].bits else "OTHER"
    exposed = "" if own.exposed is None else f"{own.exposed:8.1%}"
    return (
        f"{way.name:24} {own.losses[-1]:9.5f}  {own.difference(found['ZeRO-1']):10.1e}  {bits:5} "
        f"{own.milliseconds:10.1f} {own.gigabytes:7.2f} {exposed}"
    )


if __name__ == "__main__":
    sys.exit(main())
