"""Numbers about the whole model, each of its elements counted once whatever the layout.

An element may be held by several ranks (norms under tensor parallelism, a tied embedding on two stages): the first of
them counts it. Rows that pad the vocabulary are no elements.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatrain.optim.sharded import ShardedOptimizer
from megatrain.parallel.collectives import all_reduce


def parameter_norm(optimizer: ShardedOptimizer) -> float:
    """L2 norm of all main weights; called by all ranks."""
    parts = [main[place] for main, place in _own_places(optimizer, optimizer.main)]
    squares = torch.zeros((), dtype=torch.float64, device=optimizer.main[0].device)
    if parts:
        squares += torch.nn.utils.get_total_norm(parts).to(torch.float64).square()
    return _over_ranks(squares, optimizer).sqrt().item()


def num_zero_gradients(optimizer: ShardedOptimizer) -> int:
    """Elements of the summed gradient that are zero; called by all ranks before the gradients are cleared."""
    count = torch.zeros((), dtype=torch.int64, device=optimizer.main[0].device)
    for flat, place in _own_places(optimizer, optimizer.buffers.gradient_shards):
        count += flat[place].numel() - flat[place].count_nonzero()
    return int(_over_ranks(count, optimizer).item())


def _own_places(optimizer: ShardedOptimizer, flats: list[Tensor]) -> Iterator[tuple[Tensor, slice]]:
    """The pieces that this rank counts, as places in one flat tensor a shard."""
    grid = optimizer.parallel.grid
    for shard, flat in zip(optimizer.buffers.shards, flats, strict=True):
        for piece, place in shard.pieces():
            if grid.is_first_of(piece.copies):
                yield flat, place


def _over_ranks(number: Tensor, optimizer: ShardedOptimizer) -> Tensor:
    """The sum over ranks that count different elements. Replicas without shards of their own count all alike."""
    grid = optimizer.parallel.grid
    return all_reduce(number, grid.tp_pp if optimizer.parallel.shard_group.size == 1 else grid.world)
