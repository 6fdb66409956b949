"""Masks of blocks of queries and keys, by their positions in a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.kernels.attention.dropout import Dropout
from megatrain.kernels.attention.interface import CuSeqlens, MaskSpec
from megatrain.kernels.random import KEY_BLOCK
from megatrain.parallel.documents import Documents


@dataclass(frozen=True, kw_only=True)
class BlockMasks:
    """The masks of one pass through a layer, for blocks of queries and keys at any positions."""

    device: torch.device
    needs_explicit_mask: bool
    """See `AttentionKernel`."""
    window: int | None = None
    documents: Documents | None = None
    """Documents of the whole samples."""
    dropout: Dropout | None = None
    """Dropout of this rank's heads; each block gets its positions."""

    def between(self, queries: Sequence[range], keys: Sequence[range]) -> MaskSpec:
        """Return the mask of queries and keys at these positions.

        Args:
            keys: the positions of the queries, earlier positions, or a range that ends with the queries.
        """
        is_causal = keys[-1].stop == queries[-1].stop
        assert is_causal or keys[-1].stop <= queries[0].start, f"queries at {queries}, keys at {keys}"
        dropout = None if self.dropout is None else self.dropout.of_block(queries, keys)
        has_rules = self.window is not None or self.documents is not None
        is_square = tuple(queries) == tuple(keys)
        if self.needs_explicit_mask and (has_rules or (is_causal and not is_square)):
            explicit = self._explicit(self._positions(queries), self._positions(keys))
            return MaskSpec(explicit=explicit, dropout=dropout)
        if not has_rules:
            return MaskSpec(is_causal=is_causal, dropout=dropout)
        assert is_causal, "without explicit masks, windows and documents need keys that end with the queries"
        assert len(queries) == len(keys) == 1, f"queries at {queries}, keys at {keys}: not contiguous"
        return MaskSpec(
            is_causal=True,
            window=self.window,
            cu_seqlens=self._cu_seqlens(queries[0], keys[0]),
            dropout=dropout,
        )

    def _positions(self, ranges: Sequence[range]) -> Tensor:
        return torch.cat([torch.arange(part.start, part.stop, device=self.device) for part in ranges])

    def _explicit(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return True where a query attends to a key, from their positions: bool [b or 1, 1, sq, sk]."""
        distance = queries.unsqueeze(-1) - keys
        mask = distance >= 0
        if self.window is not None:
            mask &= distance <= self.window
        if self.documents is None:
            return mask[None, None]
        document_ids = self.documents.document_ids
        is_same = document_ids[:, queries].unsqueeze(-1) == document_ids[:, keys].unsqueeze(-2)
        return (mask & is_same).unsqueeze(1)

    def _cu_seqlens(self, queries: range, keys: range) -> CuSeqlens | None:
        if self.documents is None:
            return None
        longest = [min(self.documents.max_seqlen, len(part)) for part in (queries, keys)]
        of_queries, of_keys = (self.documents.cu_seqlens_within(part) for part in (queries, keys))
        return CuSeqlens(of_queries, of_keys, longest[0], longest[1])


def key_range(chunk: range, window: int | None) -> range:
    """Return the positions of the keys that queries at these positions need."""
    first = 0 if window is None else max(0, chunk.start - window)
    first -= first % KEY_BLOCK  # for kernels with dropout; masks exclude the keys before the window
    return range(first, chunk.stop)


def halves(rows: int) -> tuple[slice, slice]:
    """Return the rows of a rank's first and second chunk."""
    return slice(rows // 2), slice(rows // 2, None)
