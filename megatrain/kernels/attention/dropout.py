"""The dropout rule of attention: which probabilities it drops, a function of sample, head and positions only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatrain.kernels.random import KEY_BLOCK, attention_keep_mask, dropout_factor, dropout_threshold


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """Dropout of the probabilities of a block, the same under every layout.

    Fused kernels compute the mask in registers; eager attention materializes it (`mask`).
    """

    p: float
    """Dropout probability, rounded to a multiple of 2^-16."""
    key: int
    """Key of the layer's stream, from `stream_key`."""
    num_heads: int
    """Heads of the whole layer."""
    first_sample: int | Tensor = 0
    """Index in the run of the block's first sample, or int64 [], which CUDA graphs read at each replay."""
    first_head: int = 0
    """Index in the layer of the block's first head."""
    queries: tuple[range, ...] = ()
    keys: tuple[range, ...] = ()
    """Positions in the sample of the block's rows: one or two ranges."""

    @property
    def threshold(self) -> int:
        """Numbers of 16 bits that drop a probability: those below it."""
        return dropout_threshold(self.p)

    @property
    def factor(self) -> float:
        """Factor of the probabilities that are kept."""
        return dropout_factor(self.p)

    @property
    def has_whole_blocks(self) -> bool:
        """Return whether the keys begin with a block of 64, and each range but the last one ends with one."""
        ends = [part.stop for part in self.keys[:-1]]
        return all(place % KEY_BLOCK == 0 for place in [*ends, *(part.start for part in self.keys)])

    def of_block(self, queries: Sequence[range], keys: Sequence[range]) -> Dropout:
        """Return the rule for rows at these positions."""
        return replace(self, queries=tuple(queries), keys=tuple(keys))

    def mask(self, b: int, n: int, device: torch.device) -> Tensor:
        """Return True for probabilities that are kept, bool [b, n, sq, sk]."""
        sample = torch.arange(b, device=device) + self.first_sample
        head = torch.arange(n, device=device) + self.first_head
        heads = sample[:, None] * self.num_heads + head
        query = torch.cat([torch.arange(part.start, part.stop, device=device) for part in self.queries])
        parts = [attention_keep_mask(heads, query, part, key=self.key, p=self.p) for part in self.keys]
        return torch.cat(parts, dim=-1)
