"""Keys and values of whole samples on every context rank, for attention in both directions."""

from __future__ import annotations

from torch import Tensor, nn

from megatrain.parallel.batch import PassInfo
from megatrain.parallel.context.latent_context import gather_samples
from megatrain.parallel.context_parallel import ContextParallel


class WholeKeys(nn.Module):
    """Core attention of a context rank's rows to all-gathered keys and values; the backward pass sums their gradients.

    q [s/cp, b, n, d], k and v [s/cp, b, g, d] -> [s/cp, b, n * d]. `core` takes k and v of [s, b, g, d].
    """

    def __init__(self, core: nn.Module, cp: ContextParallel) -> None:
        super().__init__()
        self.core, self.cp = core, cp

    def forward(self, q: Tensor, k: Tensor, v: Tensor, info: PassInfo) -> Tensor:
        out: Tensor = self.core(q, *(gather_samples(x, self.cp) for x in (k, v)), info)
        return out
