"""Numbers about the whole model, each of its elements counted once whatever the layout.

An element may be held by several ranks (norms under tensor parallelism, a tied embedding on two stages): the first of
them counts it. Rows that pad the vocabulary are no elements.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatrain.kernels.optimizer.sum_of_squares import sum_of_squares
from megatrain.optim.sharded import WEIGHT, ShardedOptimizer


def parameter_norm(optimizer: ShardedOptimizer) -> Tensor:
    """L2 norm of all master weights, one number on the device; called by all ranks."""
    parts = [master[place] for master, place in _own_places(optimizer, optimizer.state(WEIGHT))]
    squares = sum_of_squares(parts, optimizer.device)
    return optimizer.parallel.sum_over_ranks(squares).sqrt()


def num_zero_gradients(optimizer: ShardedOptimizer) -> Tensor:
    """Elements of the summed gradient that are zero, one number on the device; called by all ranks before the gradients are cleared."""
    count = torch.zeros((), dtype=torch.int64, device=optimizer.device)
    for flat, place in _own_places(optimizer, optimizer.buffers.gradient_shards):
        count += flat[place].numel() - flat[place].count_nonzero()
    return optimizer.parallel.sum_over_ranks(count)


def _own_places(optimizer: ShardedOptimizer, flats: list[Tensor]) -> Iterator[tuple[Tensor, slice]]:
    """The pieces that this rank counts, as places in one flat tensor a shard."""
    grid = optimizer.parallel.grid
    for shard, flat in zip(optimizer.buffers.shards, flats, strict=True):
        for piece, place in shard.pieces():
            if grid.owns(piece.copies, shard.bucket.family):
                yield flat, place
