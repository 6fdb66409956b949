"""Attention of a block of queries to a block of keys, with what it takes to join blocks: the log-sum-exp of the scores.

    out, lse = kernel.forward(q, k1, v1, view) ─┐
    out, lse = kernel.forward(q, k2, v2, view) ─┴─ SoftmaxMerge ─> what all keys together give

The backward pass of a block gets the joined output and log-sum-exp, and so gives its share of the whole's gradients.
Shapes: q and out [s, b, n, d], k and v [s, b, g, d], lse [s, b, n] in the wide dtype.

Source: the joining is that of Flash-Decoding and Ring Attention, arXiv:2310.01889.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatrain.kernels.dtypes import accumulation_dtype


class CuSeqlens(NamedTuple):
    """Where documents lie in blocks whose samples lie end to end. A document may have keys and no query in a block."""

    queries: Tensor
    """int32 [documents + 1], from 0 to s * b of the queries."""
    keys: Tensor
    """The same of the keys."""
    max_queries: int
    """No document has more of them."""
    max_keys: int


@dataclass(frozen=True, kw_only=True)
class MaskSpec:
    """Which keys each query of a block sees: all of them, unless this says otherwise.

    A kernel that takes masks gets one where lengths, windows or documents ask for it; others get the rules.
    """

    is_causal: bool = False
    """None behind its own place. The last query (of each document) has the place of the last key."""
    window: int | None = None
    """Of a causal view: how many keys before its own; None: all."""
    borders: CuSeqlens | None = None
    """Only those of its own document."""
    mask: Tensor | None = None
    """True for those that it sees, bool [b or 1, 1, sq, sk], in place of all other rules."""
    kept: Tensor | None = None
    """True for those whose probability dropout keeps, bool [b, n, sq, sk]."""


class AttentionKernel(Protocol):
    """softmax(scale * q k^T) v over the keys that are in view."""

    @property
    def takes_masks(self) -> bool:
        """Whether views are to have a mask where causal blocks are not square, and for windows and documents."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, view: MaskSpec) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp; of a query that sees no key, 0 and -inf."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, view: MaskSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This block's share of the gradients of q, k and v; `out` and `lse` are those of all blocks joined."""
        ...


class SoftmaxMerge:
    """What queries got from the blocks of keys so far. Each query sees a key of the first block.

    Attributes:
        out: [s, b, n, d], in the wide dtype where blocks were joined.
        lse: [s, b, n].
    """

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.out, self.lse = out, lse
        self._is_own = False

    def add(self, out: Tensor, lse: Tensor, rows: slice = slice(None)) -> None:
        """Another block, for these rows of the queries."""
        if not self._is_own:
            self.out, self.lse = self.out.to(accumulation_dtype(self.out.dtype), copy=True), self.lse.clone()
            self._is_own = True
        known = self.lse[rows]
        self.out[rows] = self.out[rows].lerp(out.to(self.out.dtype), torch.sigmoid(lse - known).unsqueeze(-1))
        self.lse[rows] = torch.logaddexp(known, lse)

    def add_sink(self, sink: Tensor) -> None:
        """A score [n] that every query sees, and that leads nowhere."""
        self.out = self.out * torch.sigmoid(self.lse - sink).unsqueeze(-1)
        self.lse = torch.logaddexp(self.lse, sink.to(self.lse.dtype))


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Of the scores [n] that were joined by `add_sink`."""
    along = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -((sink - lse).exp() * along).sum((0, 1)).to(sink.dtype)
