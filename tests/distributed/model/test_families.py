"""Dense layers and experts in one model: sums, norm, zeros, updates and gathered weights are those of one process.

Each layer has a dense matrix and a norm, and some experts: gate and up stacked, down, and a vector that all ranks with a
slice of the expert hold. Gradients are drawn by canonical name, and each rank contributes a part of them.
"""

import math
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from everyday import one_in
from torch import Tensor

from megatrain.checkpoint.chunks import plan_chunks
from megatrain.optim.lr_schedule import Hyperparams
from megatrain.optim.muon import Muon, MuonRule
from megatrain.optim.sharded import WEIGHT, ShardedOptimizer, num_zero_gradients, parameter_norm
from megatrain.optim.update_rules import AdamwRule
from megatrain.parallel.allocate_buffers import allocate_buffers
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.data_parallel import DataParallel, DataParallelOptions
from megatrain.parallel.grid import RankGrid, RankGroup
from megatrain.parallel.initialize import InitialWeights
from megatrain.parallel.layout import Box, Init, ParamLayout, ParamRegistry, Piece, ShardedModule, box_shape
from megatrain.parallel.process_groups import make_group
from megatrain.parallel.rank_lists import GridShape
from megatrain.tools.worker_pool import WorkerPool

NUM_LAYERS, NUM_EXPERTS, HIDDEN, WIDTH = 4, 4, 6, 8
HYPERPARAMS = Hyperparams(lr=0.01, weight_decay=0.1, lr_by_kind={})
NORMAL = Init(std=1.0)
MUON = MuonRule(
    momentum=0.9, is_nesterov=True, num_steps=5, coefficients="quintic", scale_mode="spectral", extra_scale=1.0,
    splits_qkv=True, dtype=torch.float64,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    shape: GridShape
    keep_full_weights: bool = True
    keep_full_gradients: bool = True
    overlaps: bool = True
    has_muon: bool = False
    offload_fraction: float = 0.0


CASES = {
    "tp2 dp2 pp2 ep2 etp1": Case(GridShape(tp=2, dp=2, pp=2, ep=2, etp=1)),
    "tp2 dp2 pp2 ep4 etp1": Case(GridShape(tp=2, dp=2, pp=2, ep=4, etp=1), overlaps=False),
    "tp2 dp2 pp2 etp2": Case(GridShape(tp=2, dp=2, pp=2, etp=2)),
    "tp2 dp2 pp2 ep2 etp2 zero2": Case(GridShape(tp=2, dp=2, pp=2, ep=2, etp=2), keep_full_gradients=False),
    "tp2 cp2 pp2 ep2 etp1 zero3": Case(
        GridShape(tp=2, cp=2, pp=2, ep=2, etp=1), keep_full_gradients=False, keep_full_weights=False
    ),
    "tp2 dp4 etp1 zero0": Case(GridShape(tp=2, dp=4, etp=1, dp_copies=4, expert_copies=8)),
    "dp8 ep2 etp1 instances2": Case(GridShape(dp=8, ep=2, etp=1, dp_copies=2, expert_copies=2)),
    "tp2 dp4 ep2 etp1 instances2 zero3": Case(
        GridShape(tp=2, dp=4, ep=2, etp=1, dp_copies=2, expert_copies=2),
        keep_full_gradients=False,
        keep_full_weights=False,
        overlaps=False,
    ),
    "tp2 cp2 dp2 etp4": Case(GridShape(tp=2, cp=2, dp=2, etp=4), offload_fraction=0.5),
    "tp2 dp2 pp2 ep2 etp1 muon": Case(
        GridShape(tp=2, dp=2, pp=2, ep=2, etp=1, has_matrices=True), has_muon=True
    ),
    "tp2 dp4 ep2 etp2 muon": Case(
        GridShape(tp=2, dp=4, ep=2, etp=2, has_matrices=True), has_muon=True, keep_full_weights=False
    ),
}


@dataclass(frozen=True)
class Found:
    """A rank's results after each step, and the elements that it counts."""

    norms: list[float]
    """Norms of gradients, and of weights."""
    num_zeros: int
    weights: list[tuple[str, Box, np.ndarray]]
    owned: Counter[str]
    """Number of elements that this rank counts and writes, by tensor."""


@pytest.mark.parametrize("name", one_in(3, CASES))
def test_a_step_of_both_families_is_that_of_one_process(pool: WorkerPool, name: str) -> None:
    case = CASES[name]
    (whole,) = pool.run(
        1, stepped, Case(GridShape(etp=1, has_matrices=case.has_muon), has_muon=case.has_muon)
    )
    expected = {tensor: values for tensor, _, values in whole.weights}
    counted: Counter[str] = Counter()
    for found in pool.run(case.shape.world_size, stepped, case):
        assert found.num_zeros == whole.num_zeros == 2 * len(expected)
        assert found.norms == pytest.approx(whole.norms, rel=1e-12)
        for tensor, box, values in found.weights:
            part = expected[tensor][tuple(slice(*edge) for edge in box)]
            assert np.abs(values - part).max() < 1e-12, tensor
        counted += found.owned
    assert counted == {tensor: values.size for tensor, values in expected.items()} == whole.owned


def stepped(rank: int, world_size: int, case: Case) -> Found:
    """Run two steps of two micro-batches."""
    grid = build_grid(case.shape, rank, make_group)
    segments = list(layers(grid))
    optimizer = optimizer_of(case, grid, segments)
    parallel, norms, num_zeros = optimizer.parallel, [], 0
    for step in range(2):
        for is_last in (False, True):
            for number in reversed(range(len(segments))):
                for bucket in parallel.buffers.buckets_of.get(number, ()):
                    parallel.gradients.prepare(bucket)
                add_gradients(segments[number], grid, step)
                parallel.on_gradients(number, is_last=is_last)
        parallel.finish_gradients()
        norm = optimizer.gradient_norm()
        num_zeros += int(num_zero_gradients(optimizer))
        optimizer.step(HYPERPARAMS, norm=norm)
        norms += [norm.item(), float(parameter_norm(optimizer))]
        parallel.buffers.gradients.zero()
    weights = [
        (piece.name, piece.box, local_part(param.entry.parameter.data, piece).clone().numpy())
        for bucket, _ in parallel.gathered_buckets()
        for param in bucket.params
        for piece in param.entry.layout.pieces
    ]
    written = Counter[str]()
    for chunk in plan_chunks(optimizer, grid, (WEIGHT,)):
        written[chunk.name] += math.prod(box_shape(chunk.box))
    return Found(norms, num_zeros, weights, written)


def optimizer_of(case: Case, grid: RankGrid, segments: list[ShardedModule]) -> ShardedOptimizer:
    buffers = allocate_buffers(
        ParamRegistry.of(list(segments)),
        grid=grid,
        weight_dtype=torch.float64,
        grad_dtype=torch.float64,
        device=torch.device("cpu"),
        keep_full_weights=case.keep_full_weights,
        keep_full_gradients=case.keep_full_gradients,
    )
    transport = DataParallelOptions(overlap_grad_reduce=case.overlaps, overlap_param_gather=case.overlaps)
    optimizer = ShardedOptimizer(
        DataParallel(buffers, grid, transport),
        AdamwRule(beta1=0.9, beta2=0.95, eps=1e-8),
        matrices=Muon(MUON, buffers.shards, grid) if case.has_muon else None,
        clip_grad=1.0,
        master_dtype=torch.float64,
        offload_fraction=case.offload_fraction,
    )
    optimizer.fill(WEIGHT, InitialWeights(1))
    optimizer.sync_model_weights()
    return optimizer


def layers(grid: RankGrid) -> Iterator[ShardedModule]:
    """Yield this stage's layers. Every second one has experts, so that some segments have one family."""
    per_stage = NUM_LAYERS // grid.pp.size
    for number in range(grid.pp.rank * per_stage, (grid.pp.rank + 1) * per_stage):
        module = ShardedModule()
        layouts = {
            "dense": dense_layout(f"{number}.dense", grid),
            "norm": norm_layout(f"{number}.norm"),
        }
        if number % 2:
            own = range(
                grid.ep.rank * NUM_EXPERTS // grid.ep.size, (grid.ep.rank + 1) * NUM_EXPERTS // grid.ep.size
            )
            prefixes = [f"{number}.experts.{expert}" for expert in own]
            layouts |= {
                "gate_and_up": gate_and_up_layout(prefixes, grid),
                "down": down_layout(prefixes, grid),
                "out": out_layout(prefixes),
            }
        for name, layout in layouts.items():
            module.add_weight(name, layout, torch.float64)
        yield module


def part_of(size: int, group: RankGroup) -> tuple[int, int]:
    return group.rank * size // group.size, (group.rank + 1) * size // group.size


def dense_layout(name: str, grid: RankGrid) -> ParamLayout:
    rows = part_of(WIDTH, grid.tp)
    piece = Piece(name, (WIDTH, HIDDEN), (rows, (0, HIDDEN)))
    return ParamLayout(shape=piece.local_shape, pieces=(piece,), init=NORMAL)


def norm_layout(name: str) -> ParamLayout:
    piece = Piece(name, (HIDDEN,), ((0, HIDDEN),), copies=("tp",), grad_sum_groups=("tp",))
    return ParamLayout(shape=(HIDDEN,), pieces=(piece,), init=NORMAL, decays=False, kind="vector")


def gate_and_up_layout(prefixes: list[str], grid: RankGrid) -> ParamLayout:
    box = (part_of(WIDTH, grid.etp), (0, HIDDEN))
    rows = box[0][1] - box[0][0]
    names = [f"{prefix}.{part}" for prefix in prefixes for part in ("gate", "up")]
    pieces = [Piece(name, (WIDTH, HIDDEN), box, row=rows * number) for number, name in enumerate(names)]
    return ParamLayout(
        shape=(rows * len(names), HIDDEN), pieces=tuple(pieces), init=NORMAL, family="expert",
        num_matrices=len(prefixes),
    )  # fmt: skip


def down_layout(prefixes: list[str], grid: RankGrid) -> ParamLayout:
    box = ((0, HIDDEN), part_of(WIDTH, grid.etp))
    pieces = [
        Piece(f"{prefix}.down", (HIDDEN, WIDTH), box, row=HIDDEN * number)
        for number, prefix in enumerate(prefixes)
    ]
    return ParamLayout(
        shape=(HIDDEN * len(prefixes), box[1][1] - box[1][0]), pieces=tuple(pieces), init=NORMAL,
        family="expert", num_matrices=len(prefixes),
    )  # fmt: skip


def out_layout(prefixes: list[str]) -> ParamLayout:
    pieces = [
        Piece(
            f"{prefix}.out",
            (HIDDEN,),
            ((0, HIDDEN),),
            row=HIDDEN * number,
            copies=("etp",),
            grad_sum_groups=("etp",),
        )
        for number, prefix in enumerate(prefixes)
    ]
    return ParamLayout(
        shape=(HIDDEN * len(prefixes),), pieces=tuple(pieces), init=NORMAL, decays=False, kind="vector",
        family="expert",
    )  # fmt: skip


def add_gradients(module: ShardedModule, grid: RankGrid, step: int) -> None:
    """Add this rank's part of half of each gradient, which is drawn by the tensor's name."""
    for name, layout in module.layouts.items():
        for piece in layout.pieces:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{piece.name} {step}".encode()))
            whole = torch.randn(piece.shape, generator=generator, dtype=torch.float64)
            whole.view(-1)[0] = 0
            part = whole[tuple(slice(*edge) for edge in piece.box)]
            share = share_of(grid.family(layout.family).replicas)
            for group in piece.grad_sum_groups:
                share *= share_of(grid.group(group))
            local_part(module.weight_grads[name], piece).add_(part, alpha=share / 2)


def share_of(group: RankGroup) -> float:
    """Return fractions that differ between ranks and sum to 1."""
    return (group.rank + 1) / (group.size * (group.size + 1) / 2)


def local_part(local: Tensor, piece: Piece) -> Tensor:
    return local[piece.row : piece.row + piece.local_shape[0]]
