"""Optimizers of one process; one of them has parameters of every kind, for updates of whole matrices."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatrain.config.derive.lr_schedule import ParamKind
from megatrain.optim.lr_schedule import Hyperparams
from megatrain.optim.matrix_update import MatrixUpdate
from megatrain.optim.sharded import ShardedOptimizer
from megatrain.optim.update_rules import AdamwRule, UpdateRule
from megatrain.parallel.allocate_buffers import allocate_buffers
from megatrain.parallel.buckets import Shard
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.data_parallel import DataParallel
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.initialize import InitialWeights
from megatrain.parallel.layout import Init, ParamLayout, ParamRegistry, Piece, ShardedModule
from megatrain.parallel.rank_lists import GridShape

ADAMW = AdamwRule(beta1=0.9, beta2=0.95, eps=1e-8)
HYPERPARAMS = Hyperparams(lr=0.01, weight_decay=0.1)
PARAMETERS: dict[str, tuple[ParamKind, dict[str, tuple[int, ...]]]] = {
    "norm": ("vector", {"norm": (7,)}),
    "fc1": ("matrix", {"gate": (24, 12), "up": (24, 12)}),
    "table": ("positions", {"table": (5, 12)}),
    "qkv": ("matrix", {"q": (16, 12), "k": (8, 12), "v": (8, 12)}),
    "down": ("matrix", {"down": (12, 24)}),
    "experts": ("matrix", {f"{e}.{part}": (6, 12) for e in range(2) for part in ("gate", "up")}),
}


def optimizer_with(
    update_of: Callable[[Sequence[Shard], RankGrid], MatrixUpdate], dtype: torch.dtype = torch.float32
) -> ShardedOptimizer:
    module = ShardedModule()
    for name, (kind, tensors) in PARAMETERS.items():
        row, pieces = 0, []
        for tensor, shape in tensors.items():
            pieces.append(Piece(tensor, shape, tuple((0, size) for size in shape), row))
            row += shape[0]
        layout = ParamLayout(
            shape=(row, *shape[1:]),
            pieces=tuple(pieces),
            init=Init(std=1.0),
            decays=len(shape) > 1,
            kind=kind,
            is_qkv=name == "qkv",
            num_matrices=2 if name == "experts" else 1,
        )
        module.add_weight(name, layout, dtype)
    return optimizer_of_modules([module], ADAMW, dtype, update_of, clip_grad=0.0, master_dtype=dtype)


def optimizer_of_modules(
    modules: Sequence[ShardedModule],
    rule: UpdateRule,
    dtype: torch.dtype,
    update_of: Callable[[Sequence[Shard], RankGrid], MatrixUpdate] | None = None,
    **options: Any,
) -> ShardedOptimizer:
    """Return an optimizer of one process, with initial weights.

    Args:
        dtype: of the weights.
        update_of: the update of matrices.
        options: of ShardedOptimizer.
    """
    grid = build_grid(GridShape(has_matrices=update_of is not None), 0)
    buffers = allocate_buffers(
        ParamRegistry.of(list(modules)),
        grid=grid,
        weight_dtype=dtype,
        grad_dtype=torch.float32,
        device=torch.device("cpu"),
    )
    matrices = None if update_of is None else update_of(buffers.shards, grid)
    optimizer = ShardedOptimizer(DataParallel(buffers, grid), rule, matrices=matrices, **options)
    optimizer.fill("weight", InitialWeights(1))
    optimizer.sync_model_weights()
    return optimizer


def take_steps(optimizer: ShardedOptimizer, gradients: list[dict[str, torch.Tensor]]) -> None:
    for one in gradients:
        for param in optimizer.buffers.buckets[0].params:
            entry = param.entry
            entry.module.weight_grads[entry.attribute].copy_(one[entry.attribute])
        optimizer.step(HYPERPARAMS, norm=torch.tensor(1.0, dtype=torch.float64))


def weights(optimizer: ShardedOptimizer) -> dict[str, torch.Tensor]:
    return {p.entry.attribute: p.entry.parameter.data for b in optimizer.buffers.buckets for p in b.params}


def drawn(optimizer: ShardedOptimizer, steps: int = 3) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {name: value.shape for name, value in weights(optimizer).items()}
    return [
        {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for _ in range(steps)
    ]


def assert_unchanged_by_nan(optimizer: ShardedOptimizer) -> None:
    """Check that a step whose gradients are not finite changes no state."""
    before = [values.clone() for kind in optimizer.kinds for _, _, values in optimizer.owned(kind)]
    optimizer.buffers.gradients.full[0].fill_(float("nan"))
    norm = optimizer.gradient_norm()
    optimizer.step(HYPERPARAMS, norm=norm, is_finite=norm.isfinite())
    after = [values for kind in optimizer.kinds for _, _, values in optimizer.owned(kind)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def matrices(name: str, value: torch.Tensor, *, splits_qkv: bool) -> list[torch.Tensor]:
    """Return a parameter as its matrices."""
    if name == "experts":
        return list(value.split(12))
    return list(value.split([16, 8, 8])) if name == "qkv" and splits_qkv else [value]
