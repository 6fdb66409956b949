"""How attention reaches across context ranks: `--cp-comm-type`.

p2p          keys and values travel around a ring of all of them      context_ring.py
all_gather   they are gathered from all of them                       context_gather.py
a2a          each rank has all rows of some heads                     context_heads.py
a2a+p2p      in groups of neighbours; keys and values travel between these groups
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatrain.kernels.attention.blocks import AttentionKernel
from megatrain.parallel.context import ContextParallel
from megatrain.parallel.context_gather import gathered_attention
from megatrain.parallel.context_heads import to_heads, to_rows
from megatrain.parallel.context_ring import ring_attention
from megatrain.parallel.context_views import Views
from megatrain.parallel.grid import RankGrid, RankGroup


@dataclass(frozen=True)
class ContextAttention:
    """The two levels of context ranks; either may be one rank alone."""

    heads: RankGroup
    """Neighbours that exchange rows of all heads for all their rows of some heads."""
    ring: ContextParallel
    """The ranks with the same heads, whose keys and values are brought to each other."""
    gathers: bool = False
    """Whether these are gathered; else they travel around."""

    @classmethod
    def of(cls, way: str, grid: RankGrid) -> ContextAttention:
        """What `way`, as --cp-comm-type names it, means to a rank."""
        alone = RankGroup("alone", (grid.rank,), 0)
        heads, ring = grid.cp_heads, grid.cp_ring
        if "+" not in way:
            heads, ring = (grid.cp, alone) if way == "a2a" else (alone, grid.cp)
        return cls(heads, ContextParallel(ring), gathers="all_gather" in way)

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`context_heads.to_heads` over `heads`."""
        return to_heads(q, k, v, self.heads)

    def to_rows(self, out: Tensor) -> Tensor:
        """`context_heads.to_rows` over `heads`."""
        return to_rows(out, self.heads)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, kernel: AttentionKernel, views: Views
    ) -> Tensor:
        """`context_ring.ring_attention`, or `context_gather.gathered_attention`, over `ring`."""
        attention = gathered_attention if self.gathers else ring_attention
        return attention(q, k, v, sink, kernel, views, self.ring)
