"""The exponential moving average of the weights, in their place for an evaluation.

weights <─> average, sharded ─> all-gather ─> evaluation ─> average <─> weights, sharded ─> all-gather
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatrain.optim.sharded import WEIGHT, ShardedOptimizer
from megatrain.optim.update_rules import EMA


@contextmanager
def averaged_weights(optimizer: ShardedOptimizer) -> Iterator[None]:
    """Swap weights and average for the duration of the context; both are then as before, to the bit. All ranks enter it.

    It needs the memory of one more shard. Before the first step there is no average: the weights stay.
    """
    if optimizer.step_count == 0:
        yield
        return
    _swap(optimizer)
    try:
        yield
    finally:
        _swap(optimizer)


def _swap(optimizer: ShardedOptimizer) -> None:
    optimizer.wait_for_readers()
    for master, average in zip(optimizer.state(WEIGHT), optimizer.state(EMA), strict=True):
        if average.numel():  # frozen weights have no average
            weights = master.clone()
            master.copy_(average)
            average.copy_(weights)
    optimizer.sync_model_weights()
