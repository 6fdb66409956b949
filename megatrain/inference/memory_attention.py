"""Core attention of an encoder and its decoder in a model that generates text.

    PackedAttention      encoder: all tokens of each sequence attend to one another, packed as [t, 1, ...]; nothing is kept
    CachedRows           cross-attention: the first pass of a sequence writes keys and values of its memory, all passes read them;
                         and self-attention of the decoder with relative position bias

Sequences are computed one by one: their rows have different numbers, and a bias differs with them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatrain.inference.cache import MEMORY, Extent, Space
from megatrain.inference.cached_attention import CachedPass
from megatrain.kernels.attention.masked import masked_attention
from megatrain.model.families.masked_attention import MaskedAttention


class PackedAttention(nn.Module):
    """Attention of an encoder; `core` computes one sequence."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core

    def forward(self, q: Tensor, k: Tensor, v: Tensor, info: CachedPass) -> Tensor:
        """Map q [t, 1, n, d], k and v [t, 1, g, d] -> [t, 1, n * d]."""
        parts = zip(*(x.split(info.memory_lengths) for x in (q, k, v)), strict=True)
        return torch.cat([self.core(*part, info) for part in parts])


class CachedRows(nn.Module):
    """Attention of new tokens to the rows of their sequences in one layer's cache, [rows, n, d] each.

    Args:
        space: MEMORY: cross-attention; None: causal attention.
    """

    def __init__(self, core: MaskedAttention, rows: list[Tensor], space: Space) -> None:
        super().__init__()
        self.core, self.rows, self.space = core, rows, space

    def forward(self, q: Tensor, k: Tensor, v: Tensor, info: CachedPass) -> Tensor:
        """Map q [t, 1, n, d], new k and v [new rows, 1, n, d] -> [t, 1, n * d]."""
        step = info.spaces[self.space]
        for rows, values in zip(self.rows, (k, v), strict=True):
            rows.index_copy_(0, step.written, values.squeeze(1).to(rows.dtype))
        return torch.cat([self._attend(q, extent) for extent in step.extents]).flatten(2)

    def _attend(self, q: Tensor, extent: Extent) -> Tensor:
        q = q[extent.first_token : extent.first_token + extent.num_tokens]
        k, v = (x[extent.first_row : extent.first_row + extent.num_rows, None] for x in self.rows)
        bias = self.core.positions.bias(len(q), len(k)) if self.core.has_bias else None
        mask = None
        if self.space != MEMORY:
            everywhere = torch.ones(1, 1, len(q), len(k), dtype=torch.bool, device=q.device)
            mask = everywhere.tril(len(k) - len(q))
        return masked_attention(q, k, v, mask=mask, bias=bias, scale=self.core.scale)
