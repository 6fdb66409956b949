"""Keys and values of whole samples on every context rank, for attention in both directions."""

from __future__ import annotations

from torch import Tensor, nn

from megatrain.parallel.batch import PassInfo
from megatrain.parallel.collectives import all_gather, reduce_scatter
from megatrain.parallel.context_parallel import ContextParallel, to_rank_order, to_sequence_order
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.tensor_parallel import conjugate


class WholeKeys(nn.Module):
    """Core attention of a context rank's rows to all-gathered keys and values; the backward pass sums their gradients.

    q [s/cp, b, n, d], k and v [s/cp, b, g, d] -> [s/cp, b, n * d]. `core` takes k and v of [s, b, g, d].
    """

    def __init__(self, core: nn.Module, cp: ContextParallel) -> None:
        super().__init__()
        self.core, self.cp = core, cp

    def forward(self, q: Tensor, k: Tensor, v: Tensor, info: PassInfo) -> Tensor:
        k, v = (conjugate(x, self.cp.group, _gathered, _summed) for x in (k, v))
        out: Tensor = self.core(q, k, v, info)
        return out


def _gathered(x: Tensor, group: RankGroup) -> Tensor:
    return to_sequence_order(all_gather(x, group), group.size)


def _summed(dx: Tensor, group: RankGroup) -> Tensor:
    return reduce_scatter(to_rank_order(dx, group.size), group)
