"""The documents of a micro-batch, which attention does not cross."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """The documents of a micro-batch; attention does not cross their boundaries."""

    cu_seqlens: Tensor
    """Boundaries in the concatenated samples, b * s tokens: int32 [documents + 1], from 0 to b * s."""
    max_seqlen: int
    """Tokens of the longest document."""
    num_samples: int
    """b."""
    seq_length: int
    """s."""

    @functools.cached_property
    def document_ids(self) -> Tensor:
        """Index of each token's document: int64 [b, s]."""
        tokens = torch.arange(self.num_samples * self.seq_length, device=self.cu_seqlens.device)
        return torch.bucketize(tokens, self.cu_seqlens, right=True).view(self.num_samples, self.seq_length)

    def cu_seqlens_within(self, positions: range) -> Tensor:
        """Return the boundaries in the concatenated samples if each sample keeps only these positions.

        int32 [documents + 1], from 0 to b * len(positions); a document without tokens there is empty.
        """
        if len(positions) == self.seq_length:
            return self.cu_seqlens
        sample, position = self.cu_seqlens // self.seq_length, self.cu_seqlens % self.seq_length
        return sample * len(positions) + (position - positions.start).clamp(0, len(positions))

    @functools.cached_property
    def mask(self) -> Tensor:
        """True where query i attends to key j: j <= i, in the same document. Bool [b, 1, s, s]."""
        is_same = self.document_ids.unsqueeze(-1) == self.document_ids.unsqueeze(-2)
        return is_same.tril().unsqueeze(1)


def whole_samples(num_samples: int, seq_length: int, device: torch.device) -> Documents:
    """Return documents that are whole samples."""
    boundaries = torch.arange(num_samples + 1, dtype=torch.int32, device=device) * seq_length
    return Documents(boundaries, seq_length, num_samples, seq_length)
