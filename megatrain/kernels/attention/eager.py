"""Attention of blocks written out, for any device and dtype: the reference, and what softcaps and dropout run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.kernels.attention.interface import MaskSpec
from megatrain.kernels.dtypes import accumulation_dtype


class _Scores(NamedTuple):
    capped: Tensor
    """After the softcap, -inf where no key is seen: [b, n, sq, sk]."""
    derivative: Tensor | None
    """Of the softcap."""


@dataclass(frozen=True, kw_only=True)
class EagerAttention:
    """All scores of a block are in memory, in the wide dtype."""

    scale: float
    softcap: float | None = None
    """Scores stay within this, by tanh."""
    dropout: float = 0.0
    """Share of the probabilities that is dropped where a view says which are kept."""

    @property
    def takes_masks(self) -> bool:
        return True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, view: MaskSpec) -> tuple[Tensor, Tensor]:
        queries, keys, values = (_by_group(x, k.shape[2]) for x in (q, k, v))
        scores = self._scores(queries, keys, view, q.shape[2]).capped
        lse = scores.logsumexp(-1)
        shares = self._thinned(self._shares(scores, lse), view)
        out = _rows(_in_groups(shares, k.shape[2]) @ values, q.shape[2])
        return out.to(q.dtype), lse.permute(2, 0, 1)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, view: MaskSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups, heads = k.shape[2], q.shape[2]
        queries, keys, values, upstream = (_by_group(x, groups) for x in (q, k, v, dout))
        scores = self._scores(queries, keys, view, heads)
        shares = self._shares(scores.capped, lse.permute(1, 2, 0))
        along = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).permute(1, 2, 0).unsqueeze(-1)
        dshares = (upstream @ values.mT).view_as(shares)
        dscores = shares * (self._thinned(dshares, view) - along)
        if scores.derivative is not None:
            dscores *= scores.derivative
        dscores = _in_groups(dscores * self.scale, groups)
        thinned = _in_groups(self._thinned(shares, view), groups)
        dq, dk, dv = dscores @ keys, dscores.mT @ queries, thinned.mT @ upstream
        return _rows(dq, heads).to(q.dtype), _rows(dk, groups).to(k.dtype), _rows(dv, groups).to(v.dtype)

    def _scores(self, queries: Tensor, keys: Tensor, view: MaskSpec, num_heads: int) -> _Scores:
        scores = (queries * self.scale) @ keys.mT
        scores = scores.reshape(scores.shape[0], num_heads, -1, scores.shape[-1])
        derivative = None
        if self.softcap is not None:
            bent = torch.tanh(scores / self.softcap)
            scores, derivative = bent * self.softcap, 1 - bent.square()
        mask = view.mask
        if mask is None and view.is_causal:
            assert scores.shape[-1] == scores.shape[-2], "a view that is not square has a mask"
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        return _Scores(scores if mask is None else scores.masked_fill(~mask, float("-inf")), derivative)

    @staticmethod
    def _shares(scores: Tensor, lse: Tensor) -> Tensor:
        """Probabilities; 0 for a query that sees no key."""
        return (scores - lse.masked_fill(lse == float("-inf"), 0).unsqueeze(-1)).exp()

    def _thinned(self, x: Tensor, view: MaskSpec) -> Tensor:
        return x if view.kept is None else x * view.kept / (1 - self.dropout)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[s, b, n, d] -> [b, g, n/g * s, d] in the wide dtype, the heads of a group one behind the other."""
    return _in_groups(x.to(accumulation_dtype(x.dtype)).permute(1, 2, 0, 3), groups)


def _in_groups(x: Tensor, groups: int) -> Tensor:
    """[b, n, sq, sk] -> [b, g, n/g * sq, sk]."""
    b, heads, rows, columns = x.shape
    return x.reshape(b, groups, heads // groups * rows, columns)


def _rows(x: Tensor, heads: int) -> Tensor:
    """[b, g, n/g * s, d] -> [s, b, n, d]."""
    b, _, _, d = x.shape
    return x.reshape(b, heads, -1, d).permute(2, 0, 1, 3)
