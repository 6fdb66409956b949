"""Interface of attention kernels for blocks of queries and keys, and the merge of blocks by log-sum-exp.

    out, lse = kernel.forward(q, k1, v1, mask) ─┐
    out, lse = kernel.forward(q, k2, v2, mask) ─┴─ SoftmaxMerge ─> attention over all keys

The backward pass of a block takes the merged output and log-sum-exp, and returns the block's contribution to the
gradients. Shapes: q and out [s, b, n, d], k and v [s, b, g, d], lse [s, b, n] in the accumulation dtype.

Source: the merge of Flash-Decoding and Ring Attention, arXiv:2310.01889.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatrain.kernels.attention.dropout import Dropout
from megatrain.kernels.dtypes import accumulation_dtype


class CuSeqlens(NamedTuple):
    """Cumulative lengths of the documents in blocks of concatenated samples. A document may have keys but no queries."""

    cu_seqlens_q: Tensor
    """int32 [documents + 1], from 0 to s * b of the queries."""
    cu_seqlens_k: Tensor
    """int32 [documents + 1], from 0 to s * b of the keys."""
    max_seqlen_q: int
    """Upper bound of a document's queries."""
    max_seqlen_k: int
    """Upper bound of a document's keys."""


class DistanceBias(NamedTuple):
    """Numbers that are added to scaled scores, a function of head and distance, key - query."""

    table: Tensor
    """A number of each bucket and head, [buckets, n]."""
    buckets: Tensor
    """The bucket of each distance, int32 [sq + sk - 1], from 1 - sq on."""
    reach: int
    """Distance from which on the bucket is the same, in each direction."""
    table_grad: Tensor | None = None
    """Memory to which a fused backward pass adds the gradient of the table; None: nothing needs it."""


@dataclass(frozen=True, kw_only=True)
class MaskSpec:
    """The keys that each query of a block attends to; by default all of them.

    A kernel with `needs_explicit_mask` gets `explicit` for blocks that are not square, windows and documents; other
    kernels get the rules.
    """

    is_causal: bool = False
    """No keys after the query. The last query (of each document) has the position of the last key."""
    window: int | None = None
    """Keys before the query's own position, with `is_causal`; None: all."""
    cu_seqlens: CuSeqlens | None = None
    """Only keys of the query's document."""
    is_token: Tensor | None = None
    """True for keys that are no padding, bool [b, sk], with one for each sample; None: all. Only megatrain's kernel reads it."""
    explicit: Tensor | None = None
    """True for keys to attend to, bool [b or 1, 1, sq, sk]; replaces all other rules."""
    dropout: Dropout | None = None
    """Dropout of the probabilities; None in evaluation."""


class AttentionKernel(Protocol):
    """softmax(scale * q k^T) v over the keys that a mask allows."""

    @property
    def needs_explicit_mask(self) -> bool:
        """True: masks must be explicit for causal blocks that are not square, windows and documents."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp; 0 and -inf for a query without keys."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: MaskSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this block's contribution to the gradients of q, k and v; `out` and `lse` are merged over all blocks."""
        ...


class SoftmaxMerge:
    """Attention over the blocks of keys so far, merged by log-sum-exp. Every query has a key in the first block.

    Attributes:
        out: [s, b, n, d], in the accumulation dtype after a merge.
        lse: [s, b, n].
    """

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.out, self.lse = out, lse
        self._is_copied = False

    def add(self, out: Tensor, lse: Tensor, rows: slice = slice(None)) -> None:
        """Merge another block for these rows of the queries."""
        if not self._is_copied:
            self.out, self.lse = self.out.to(accumulation_dtype(self.out.dtype), copy=True), self.lse.clone()
            self._is_copied = True
        merged = self.lse[rows]
        self.out[rows] = self.out[rows].lerp(
            out.to(self.out.dtype), torch.sigmoid(lse - merged).unsqueeze(-1)
        )
        self.lse[rows] = torch.logaddexp(merged, lse)

    def add_sink(self, sink: Tensor) -> None:
        """Add sink logits [n] to the softmax denominators; they contribute no value."""
        self.out = self.out * torch.sigmoid(self.lse - sink).unsqueeze(-1)
        self.lse = torch.logaddexp(self.lse, sink.to(self.lse.dtype))


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Return the gradient of sink logits [n] that `add_sink` added."""
    dout_dot_out = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -((sink - lse).exp() * dout_dot_out).sum((0, 1)).to(sink.dtype)
