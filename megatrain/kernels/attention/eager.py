"""Eager attention of blocks for any device and dtype: the reference, and the implementation of softcaps and dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.kernels.attention.dropout import Dropout
from megatrain.kernels.attention.interface import MaskSpec
from megatrain.kernels.dtypes import accumulation_dtype


class _Scores(NamedTuple):
    capped: Tensor
    """Scores after the softcap, -inf for masked keys: [b, n, sq, sk]."""
    derivative: Tensor | None
    """Derivative of the softcap."""


@dataclass(frozen=True, kw_only=True)
class EagerAttention:
    """Attention that materializes all scores of a block in the accumulation dtype."""

    scale: float
    softcap: float | None = None
    """Bound of the scores: softcap * tanh(score / softcap)."""

    needs_explicit_mask = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec) -> tuple[Tensor, Tensor]:
        queries, keys, values = (_by_group(x, k.shape[2]) for x in (q, k, v))
        scores = self._scores(queries, keys, mask, q.shape[2]).capped
        lse = scores.logsumexp(-1)
        probs = self._probs(scores, lse)
        if mask.dropout is not None:
            probs = probs * _kept(probs, mask.dropout)
        out = _rows(_in_groups(probs, k.shape[2]) @ values, q.shape[2])
        return out.to(q.dtype), lse.permute(2, 0, 1)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: MaskSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups, heads = k.shape[2], q.shape[2]
        queries, keys, values, upstream = (_by_group(x, groups) for x in (q, k, v, dout))
        scores = self._scores(queries, keys, mask, heads)
        probs = self._probs(scores.capped, lse.permute(1, 2, 0))
        dout_dot_out = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).permute(1, 2, 0).unsqueeze(-1)
        dprobs = (upstream @ values.mT).view_as(probs)
        dropped = probs
        if mask.dropout is not None:
            kept = _kept(probs, mask.dropout)
            dropped, dprobs = probs * kept, dprobs * kept
        dscores = probs * (dprobs - dout_dot_out)
        if scores.derivative is not None:
            dscores *= scores.derivative
        dscores = _in_groups(dscores * self.scale, groups)
        dropped = _in_groups(dropped, groups)
        dq, dk, dv = dscores @ keys, dscores.mT @ queries, dropped.mT @ upstream
        return _rows(dq, heads).to(q.dtype), _rows(dk, groups).to(k.dtype), _rows(dv, groups).to(v.dtype)

    def _scores(self, queries: Tensor, keys: Tensor, mask: MaskSpec, num_heads: int) -> _Scores:
        scores = (queries * self.scale) @ keys.mT
        scores = scores.reshape(scores.shape[0], num_heads, -1, scores.shape[-1])
        derivative = None
        if self.softcap is not None:
            tanh = torch.tanh(scores / self.softcap)
            scores, derivative = tanh * self.softcap, 1 - tanh.square()
        allowed = mask.explicit
        if allowed is None and mask.is_causal:
            assert scores.shape[-1] == scores.shape[-2], "a block that is not square has an explicit mask"
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        return _Scores(scores if allowed is None else scores.masked_fill(~allowed, float("-inf")), derivative)

    @staticmethod
    def _probs(scores: Tensor, lse: Tensor) -> Tensor:
        """Return attention probabilities; 0 for a query without keys."""
        return (scores - lse.masked_fill(lse == float("-inf"), 0).unsqueeze(-1)).exp()


def _kept(probs: Tensor, dropout: Dropout) -> Tensor:
    """Return the factor of each probability, [b, n, sq, sk]: 0 where dropout drops it."""
    return dropout.mask(probs.shape[0], probs.shape[1], probs.device).to(probs.dtype) * dropout.factor


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[s, b, n, d] -> [b, g, n/g * s, d] in the accumulation dtype: the heads of a group are concatenated."""
    return _in_groups(x.to(accumulation_dtype(x.dtype)).permute(1, 2, 0, 3), groups)


def _in_groups(x: Tensor, groups: int) -> Tensor:
    """[b, n, sq, sk] -> [b, g, n/g * sq, sk]."""
    b, heads, rows, columns = x.shape
    return x.reshape(b, groups, heads // groups * rows, columns)


def _rows(x: Tensor, heads: int) -> Tensor:
    """[b, g, n/g * s, d] -> [s, b, n, d]."""
    b, _, _, d = x.shape
    return x.reshape(b, heads, -1, d).permute(2, 0, 1, 3)
