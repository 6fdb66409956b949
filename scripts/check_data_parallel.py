"""Train a small model in bf16 with each variant of data parallelism, on the GPUs of one host, and compare the runs.

    python -m torch.distributed.run --nproc-per-node 2 scripts/check_data_parallel.py      4: also instances and stages

Overlap must change no bit of losses, norms and master weights. Other variants sum in other orders: their losses may differ by
four times the difference that half the micro-batch causes. Sharding more must take less memory. Exit code 1 otherwise.
`--device cpu` runs a tiny model over gloo, without memory and communication figures.
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

from megatrain.config import Facts, parse, resolve
from megatrain.parallel.batch import Batch
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.process_groups import make_group
from megatrain.parallel.rank_lists import GridShape
from megatrain.training.build import build_schedules
from megatrain.training.debugging.trace_summary import summarize
from megatrain.training.engine import Engine
from megatrain.training.launch.ranks import grid_shape

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
class Variant:
    """A variant of data parallelism."""

    name: str
    flags: str
    same_bits_as: str | None = None
    """Variant that must give the same bits."""
    smaller_than: str | None = None
    """Variant that must take more memory."""
    num_ranks: int = 2
    micro_batch: int = 4
    band: int = 4
    """Largest difference of losses, in multiples of the noise."""


VARIANTS = (
    Variant("ZeRO-1", ""),
    Variant("ZeRO-1 repeated", "", same_bits_as="ZeRO-1"),
    Variant("ZeRO-1, micro-batch 2", "", micro_batch=2),
    Variant("ZeRO-1, no overlap", NO_OVERLAP, same_bits_as="ZeRO-1"),
    Variant("ZeRO-0", f"{STRATEGY} no_shard"),
    Variant("ZeRO-0, no overlap", f"{STRATEGY} no_shard {NO_OVERLAP}", same_bits_as="ZeRO-0"),
    Variant("ZeRO-2", f"{STRATEGY} optim_grads", smaller_than="ZeRO-1"),
    Variant("ZeRO-2, no overlap", f"{STRATEGY} optim_grads {NO_OVERLAP}", same_bits_as="ZeRO-2"),
    Variant("ZeRO-3", f"{STRATEGY} optim_grads_params", smaller_than="ZeRO-2"),
    Variant("ZeRO-3, no overlap", f"{STRATEGY} optim_grads_params {NO_OVERLAP}", same_bits_as="ZeRO-3"),
    Variant("ZeRO-3, recomputed", f"{STRATEGY} optim_grads_params {RECOMPUTE}"),
    Variant(
        "ZeRO-1, reduction in bf16", "--grad-reduce-in-bf16", band=40
    ),  # each rank's gradients are rounded to 8 bits
    Variant("ZeRO-1, 2 instances", INSTANCES, num_ranks=4),
    Variant("ZeRO-3, 2 instances", f"{STRATEGY} optim_grads_params {INSTANCES}", num_ranks=4),
    Variant(
        "ZeRO-3, 2 stages", f"{STRATEGY} optim_grads_params --pipeline-model-parallel-size 2", num_ranks=4
    ),
)
"""The third one measures the noise: the effect of another order of sums."""
NOISE = VARIANTS[2].name


@dataclass(frozen=True)
class Result:
    """Measurements of a variant."""

    losses: list[float]
    norms: list[float]
    hashes: list[str]
    """Hash of each rank's master weights after the last step."""
    milliseconds: float
    gigabytes: float
    exposed: float | None
    """Fraction of a step in which rank 0's GPU communicates and does not compute."""

    @property
    def bits(self) -> tuple[Any, ...]:
        return self.losses, self.norms, self.hashes

    def difference(self, other: Result) -> float:
        """Return the largest relative difference of losses."""
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
    torch.use_deterministic_algorithms(
        True, warn_only=True
    )  # atomic sums, mainly of the embedding's gradient
    torch.utils.deterministic.fill_uninitialized_memory = False
    dist.init_process_group(
        "nccl" if name == "cuda" else "gloo", device_id=device if name == "cuda" else None
    )
    grids: dict[GridShape, RankGrid] = {}
    results: dict[str, Result] = {}
    problems: list[str] = []
    if rank == 0:
        print(
            f"{world_size} ranks, {NUM_STEPS} steps in bf16; differences of losses from ZeRO-1's; memory and exposed communication of rank 0"
        )
        print(f"{'':24} {'last loss':>9}  difference  bits     ms/step      GB  exposed", flush=True)
    for variant in (one for one in VARIANTS if one.num_ranks <= world_size):
        results[variant.name] = run(variant, world_size, rank, device, grids)
        problems += problems_of(variant, results, is_memory_known=name == "cuda")
        if rank == 0:
            print(row(variant, results), flush=True)
    if rank == 0:
        print("\n".join(problems) or "all variants passed")
    dist.barrier()
    dist.destroy_process_group()
    return 1 if problems else 0


def run(
    variant: Variant, world_size: int, rank: int, device: torch.device, grids: dict[GridShape, RankGrid]
) -> Result:
    """Train with a variant; return its measurements."""
    flags = f"{SIZES[device.type]} {COMMON} --micro-batch-size {variant.micro_batch} --device {device.type} {variant.flags}"
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
    hyperparams = build_schedules(plan).at(0)
    vocab, length = plan.derived.vocab_size, plan.config.data.seq_length
    losses, norms, milliseconds = [], [], []
    for step in range(NUM_STEPS):
        batches = batches_of(step, engine, vocab, length, variant.micro_batch)
        began = time.perf_counter()
        report = engine.step(batches, hyperparams, first_sample=step * GLOBAL_BATCH)
        milliseconds.append(1000 * (time.perf_counter() - began))
        losses.append(report.lm_loss)
        norms.append(report.grad_norm)
    hashes: list[Any] = [None] * world_size
    dist.all_gather_object(hashes, weights_hash(engine))
    used = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    exposed = None
    if device.type == "cuda":
        steps = [batches_of(step, engine, vocab, length, variant.micro_batch) for step in range(NUM_PROFILED)]
        exposed = exposed_fraction(engine, steps, is_profiled=rank == 0)
    engine.data_parallel.wait_for_weights()
    del engine
    gc.collect()
    return Result(losses, norms, hashes, statistics.median(milliseconds[3:]), used, exposed)


def batches_of(step: int, engine: Engine, vocab: int, length: int, micro_batch: int) -> list[Batch]:
    """Return this replica's micro-batches: arithmetic progressions of ids, which a model learns to continue."""
    dp = engine.grid.dp
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(vocab, (GLOBAL_BATCH, 1), generator=generator)
    stride = torch.randint(1, 9, (GLOBAL_BATCH, 1), generator=generator)
    ids = ((first + stride * torch.arange(length + 1)) % vocab).to(engine.device)
    position_ids = torch.arange(length, device=engine.device).expand(micro_batch, -1)
    batches = []
    for start in range(dp.rank * micro_batch, GLOBAL_BATCH, dp.size * micro_batch):
        rows = ids[start : start + micro_batch]
        ones = torch.ones(micro_batch, length, device=engine.device)
        batches.append(
            Batch(
                tokens=rows[:, :-1].contiguous(),
                labels=rows[:, 1:].contiguous(),
                loss_mask=ones,
                position_ids=position_ids,
            )
        )
    return batches


def weights_hash(engine: Engine) -> str:
    """Return a hash of the master weights of this rank's shard."""
    digest = hashlib.blake2b(digest_size=8)
    for flat in engine.optimizer.state("weight"):
        digest.update(flat.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def exposed_fraction(engine: Engine, steps: list[list[Batch]], *, is_profiled: bool) -> float | None:
    """Run a few more steps on all ranks; return the exposed fraction of the profiled rank, None on the others."""
    hyperparams = build_schedules(engine.plan).at(0)
    torch.cuda.synchronize()
    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) if is_profiled else None
    if profiler is not None:
        profiler.start()
    for batches in steps:
        engine.step(batches, hyperparams)
    torch.cuda.synchronize()
    if profiler is None:
        return None
    profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        parts = summarize(json.loads(path.read_text())["traceEvents"], num_steps=len(steps)).parts.values()
    return sum(part.exposed for part in parts) / sum(part.total for part in parts)


def problems_of(variant: Variant, results: dict[str, Result], *, is_memory_known: bool) -> list[str]:
    """Return a sentence for each requirement that the variant does not satisfy."""
    own, problems = results[variant.name], []
    if variant.same_bits_as is not None and own.bits != results[variant.same_bits_as].bits:
        problems.append(f"{variant.name}: other bits than {variant.same_bits_as}")
    if NOISE in results:
        difference, noise = own.difference(results["ZeRO-1"]), results[NOISE].difference(results["ZeRO-1"])
        if not difference <= variant.band * noise:
            problems.append(
                f"{variant.name}: losses differ by {difference:.1e}; another order of sums causes {noise:.1e}"
            )
    if (
        is_memory_known
        and variant.smaller_than is not None
        and own.gigabytes >= results[variant.smaller_than].gigabytes
    ):
        problems.append(f"{variant.name}: takes at least as much memory as {variant.smaller_than}")
    return problems


def row(variant: Variant, results: dict[str, Result]) -> str:
    own = results[variant.name]
    bits = (
        ""
        if variant.same_bits_as is None
        else "same"
        if own.bits == results[variant.same_bits_as].bits
        else "OTHER"
    )
    exposed = "" if own.exposed is None else f"{own.exposed:8.1%}"
    return (
        f"{variant.name:24} {own.losses[-1]:9.5f}  {own.difference(results['ZeRO-1']):10.1e}  {bits:5} "
        f"{own.milliseconds:10.1f} {own.gigabytes:7.2f} {exposed}"
    )


if __name__ == "__main__":
    sys.exit(main())
