"""Core attention of the `local` implementation over kernels that tell the log-sum-exp of their scores.

Context ranks bring keys and values to each other, or exchange heads; blocks are joined. On one rank it serves what
`LocalCoreAttention` does not: sinks join by the log-sum-exp, softcaps and dropout run on scores that are written out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatrain.kernels.attention.blocks import AttentionKernel
from megatrain.kernels.attention.eager import WrittenAttention
from megatrain.kernels.attention.libraries import attention_kernel
from megatrain.kernels.dropout import keep_mask
from megatrain.model import functions
from megatrain.model.specs import AttentionSpec
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.context_attention import ContextAttention
from megatrain.parallel.context_views import Views
from megatrain.parallel.layout import LaidOutModule, ParamLayout
from megatrain.parallel.tensor import TensorParallel


class LocalContextAttention(LaidOutModule):
    """softmax(cap(q k^T * scale), sink) v of this rank's rows and heads, over the whole samples.

    Args:
        sink: layout of learned sinks.
        backend: the kernel, as `derived.attention_backend` names it.
        dtype: of the sinks.
    """

    sink: Tensor

    def __init__(
        self,
        spec: AttentionSpec,
        sink: ParamLayout | None,
        dropout_key: int,
        tp: TensorParallel,
        over: ContextAttention,
        backend: str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.kernel = _kernel(spec, backend)
        self.dropout_key = dropout_key
        self.tp, self.over = tp, over
        if sink is not None:
            self.add_weight("sink", sink, dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, info: PassInfo) -> Tensor:
        q, k, v = self.over.to_heads(q, k, v)
        kernel = self.kernel
        views = Views(
            device=q.device,
            takes_masks=kernel.takes_masks,
            window=self.spec.window,
            documents=info.documents,
            keeps=_Keeps(self, q, info) if self.spec.dropout and info.is_training else None,
        )
        out = self.over.attend(q, k, v, self._sinks(q), kernel, views)
        return self.over.to_rows(out).flatten(2)

    def _sinks(self, q: Tensor) -> Tensor | None:
        """One more score for all queries of each of these heads, in the wide dtype."""
        own_heads = q.shape[2]
        if self.spec.sink == "none":
            return None
        if self.spec.sink == "zero":
            return q.new_zeros(own_heads)
        sink = functions.as_leaf(self.sink, self.weight_grads.get("sink"))
        return sink[self.over.heads.rank * own_heads :][:own_heads]


def _kernel(spec: AttentionSpec, backend: str) -> AttentionKernel:
    scale = spec.scale if spec.scale is not None else 1 / math.sqrt(spec.head_channels)
    if spec.softcap is not None or spec.dropout:
        return WrittenAttention(scale=scale, softcap=spec.softcap, dropout=spec.dropout)
    return attention_kernel(backend, scale)


class _Keeps:
    """Which probabilities dropout keeps, numbered by sample, head of the whole layer and places in the sample."""

    def __init__(self, attention: LocalContextAttention, q: Tensor, info: PassInfo) -> None:
        s, b, n, _ = q.shape
        self.s = s * attention.over.ring.size
        self.key, self.p = attention.dropout_key, attention.spec.dropout
        sample = torch.arange(b, device=q.device) + info.first_sample
        heads = attention.over.heads
        head = torch.arange(n, device=q.device) + (attention.tp.rank * heads.size + heads.rank) * n
        self.rows = (sample[:, None] * attention.spec.num_heads + head)[..., None] * self.s

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Bool [b, n, queries, keys]."""
        return keep_mask(self.rows + queries, self.s, key=self.key, p=self.p)[..., keys]
