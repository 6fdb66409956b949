"""Core attention of the `local` implementation: softmax(cap(q k^T * scale), sink) v.

    LocalAttention          one context rank, with windows and documents
    LocalContextAttention   several context ranks, and features without a fused kernel: sinks, softcap, dropout

Two classes: torch's SDPA takes any head size and dtype and differentiates itself. Context parallelism needs kernels that
return the log-sum-exp, copies keys and values into one buffer and sums their gradients in the accumulation dtype.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megatrain.kernels.attention.backends import Flash4, attention_kernel
from megatrain.kernels.attention.eager import EagerAttention
from megatrain.kernels.attention.interface import AttentionKernel, CuSeqlens, MaskSpec
from megatrain.kernels.attention.torch_sdpa import sdpa, varlen_attention
from megatrain.kernels.random import keep_mask
from megatrain.model import functions
from megatrain.model.specs import AttentionSpec
from megatrain.parallel.batch import Documents, PassInfo, whole_samples
from megatrain.parallel.context_attention import BlockMasks, ContextAttention
from megatrain.parallel.layout import LaidOutModule, ParamLayout
from megatrain.parallel.tensor_parallel import TensorParallel


class LocalAttention(nn.Module):
    """Attention of this rank's heads by a fused kernel; `backend` is a value of `derived.attention_backend`."""

    def __init__(self, spec: AttentionSpec, backend: str) -> None:
        super().__init__()
        self.spec = spec
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, info: PassInfo) -> Tensor:
        documents, window, scale = info.documents, self.spec.window, self.spec.scale
        if self.backend == "flash4":
            mask = MaskSpec(is_causal=True, window=window, cu_seqlens=_cu_seqlens(documents))
            out = functions.attend(q, k, v, Flash4(_scale(self.spec)), mask)
        elif documents is None and window is None:
            out = sdpa(q, k, v, self.backend, scale=scale)
        elif self.backend == "sdpa":
            out = sdpa(
                q, k, v, self.backend, scale=scale, mask=causal_mask(q.shape[0], documents, window, q.device)
            )
        else:
            assert self.backend == "flash2", "windows and documents need FlashAttention-2"
            documents = documents or whole_samples(q.shape[1], q.shape[0], q.device)
            out = varlen_attention(
                q, k, v, documents.cu_seqlens, documents.max_seqlen, scale=scale, window=window
            )
        return out.flatten(2)


class LocalContextAttention(LaidOutModule):
    """Attention of this rank's rows and heads to the whole samples.

    Args:
        sink: layout of learned sink logits.
        backend: value of `derived.attention_backend`.
        dtype: dtype of the sink logits.
    """

    sink: Tensor

    def __init__(
        self,
        spec: AttentionSpec,
        sink: ParamLayout | None,
        dropout_key: int,
        tp: TensorParallel,
        context: ContextAttention,
        backend: str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.kernel = _kernel(spec, backend)
        self.dropout_key = dropout_key
        self.tp, self.context = tp, context
        if sink is not None:
            self.add_weight("sink", sink, dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, info: PassInfo) -> Tensor:
        q, k, v = self.context.sequence_to_heads(q, k, v)
        masks = BlockMasks(
            device=q.device,
            needs_explicit_mask=self.kernel.needs_explicit_mask,
            window=self.spec.window,
            documents=info.documents,
            keep_fn=_DropoutMask(self, q, info) if self.spec.dropout and info.is_training else None,
        )
        out = self.context.attend(q, k, v, self._sink_logits(q), self.kernel, masks)
        return self.context.heads_to_sequence(out).flatten(2)

    def _sink_logits(self, q: Tensor) -> Tensor | None:
        """Return the sink logit of each local head, [n], which enters the softmax denominator."""
        num_heads = q.shape[2]
        if self.spec.sink == "none":
            return None
        if self.spec.sink == "zero":
            return q.new_zeros(num_heads)
        sink = functions.as_leaf(self.sink, self.weight_grads.get("sink"))
        return sink[self.context.heads.rank * num_heads :][:num_heads]


class _DropoutMask:
    """The probabilities that dropout keeps, a function of sample, head of the whole layer and positions in the sample."""

    def __init__(self, attention: LocalContextAttention, q: Tensor, info: PassInfo) -> None:
        s, b, n, _ = q.shape
        context = attention.context
        self.s = s * context.ring.size
        self.key, self.p = attention.dropout_key, attention.spec.dropout
        sample = torch.arange(b, device=q.device) + info.first_sample
        first_head = (attention.tp.rank * context.heads.size + context.heads.rank) * n
        head = torch.arange(n, device=q.device) + first_head
        self.rows = (sample[:, None] * attention.spec.num_heads + head)[..., None] * self.s

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the mask of query and key positions, bool [b, n, sq, sk]."""
        return keep_mask(self.rows + queries, self.s, key=self.key, p=self.p)[..., keys]


def _kernel(spec: AttentionSpec, backend: str) -> AttentionKernel:
    if spec.softcap is not None or spec.dropout:
        return EagerAttention(scale=_scale(spec), softcap=spec.softcap, dropout=spec.dropout)
    return attention_kernel(backend, _scale(spec))


def _scale(spec: AttentionSpec) -> float:
    return 1 / math.sqrt(spec.head_channels) if spec.scale is None else spec.scale


def _cu_seqlens(documents: Documents | None) -> CuSeqlens | None:
    if documents is None:
        return None
    lengths, longest = documents.cu_seqlens, documents.max_seqlen
    return CuSeqlens(lengths, lengths, longest, longest)


def causal_mask(s: int, documents: Documents | None, window: int | None, device: torch.device) -> Tensor:
    """Return True where query i attends to key j: j <= i, in its document and its window. Bool [b or 1, 1, s, s]."""
    mask = documents.mask if documents else torch.ones(1, 1, s, s, dtype=torch.bool, device=device).tril()
    return mask if window is None else mask.triu(-window)
