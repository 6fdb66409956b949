"""Statistics of the whole model that count each element once under every layout.

Several ranks may hold an element (norms under tensor parallelism, a tied embedding on two stages): the first of them
counts it. Padding rows of the vocabulary do not count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.optimizer.sum_of_squares import sum_of_squares
from megatrain.optim.sharded import WEIGHT, ShardedOptimizer


def parameter_norm(optimizer: ShardedOptimizer) -> Tensor:
    """Return the L2 norm of all master weights, [] on the device; called by all ranks."""
    squares = sum_of_squares(optimizer.counted(optimizer.state(WEIGHT)), optimizer.device)
    return optimizer.parallel.sum_over_ranks(squares).sqrt()


def num_zero_gradients(optimizer: ShardedOptimizer) -> Tensor:
    """Return the number of zeros in the reduced gradient, int64 [] on the device; called by all ranks before gradients are cleared."""
    count = torch.zeros((), dtype=torch.int64, device=optimizer.device)
    for part in optimizer.counted(optimizer.buffers.gradients.shards):
        count += part.numel() - part.count_nonzero()
    return optimizer.parallel.sum_over_ranks(count)
