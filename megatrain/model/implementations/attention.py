"""Core attention of the `local` implementation: softmax(cap(q k^T * scale), sink) v.

    LocalAttention          one context rank, with windows and documents
    LocalContextAttention   several context ranks, sinks, softcap, dropout

Values may have fewer channels than keys. Kernels without support for that get values with channels of zeros.

Two classes: torch's SDPA takes any head size and dtype and differentiates itself. Context parallelism needs kernels that
return the log-sum-exp, copies keys and values into one buffer and sums their gradients in the accumulation dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.kernels.attention.backends import Flash4, attention_kernel
from megatrain.kernels.attention.dropout import Dropout
from megatrain.kernels.attention.eager import EagerAttention
from megatrain.kernels.attention.interface import AttentionKernel, CuSeqlens, MaskSpec
from megatrain.kernels.attention.torch_sdpa import sdpa, varlen_attention
from megatrain.model import functions
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.context.block_masks import BlockMasks
from megatrain.parallel.context.context_attention import ContextAttention
from megatrain.parallel.documents import Documents, whole_samples
from megatrain.parallel.layout import ParamLayout, ShardedModule
from megatrain.parallel.tensor_parallel import TensorParallel


class LocalAttention(nn.Module):
    """Attention of this rank's heads by a fused kernel; `backend` is a value of `derived.attention_backend`."""

    def __init__(self, spec: AttentionSpec, backend: str) -> None:
        super().__init__()
        self.spec = spec
        self.backend = backend
        self.v_head_dim = spec.v_head_dim
        self.padding = spec.head_dim - spec.v_head_dim

    def forward(self, q: Tensor, k: Tensor, v: Tensor, info: PassInfo) -> Tensor:
        documents, window, scale = info.documents, self.spec.window, self.spec.scale
        v = v if self.backend == "sdpa" else padded(v, self.padding)
        if self.backend == "flash4":
            mask = MaskSpec(is_causal=True, window=window, cu_seqlens=_cu_seqlens(documents))
            out = functions.attend(q, k, v, Flash4(self.spec.score_scale), mask)
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
        return out[..., : self.v_head_dim].flatten(2)


class LocalContextAttention(ShardedModule):
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
        is_alone = context.ring.size == context.heads.size == 1 and spec.sink == "none"
        is_native = is_alone and isinstance(self.kernel, EagerAttention)
        self.v_head_dim = spec.v_head_dim
        self.padding = 0 if is_native else spec.head_dim - spec.v_head_dim
        self.dropout_key = dropout_key
        self.tp, self.context = tp, context
        if sink is not None:
            self.add_weight("sink", sink, dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, info: PassInfo) -> Tensor:
        q, k, v = self.context.sequence_to_heads(q, k, self.padded(v))
        masks = self.masks(q, info)
        sink, ring = self.sink_logits(q), self.context.ring
        if ring.size == 1 and sink is None:  # one block: nothing to merge
            whole = ring.position_ranges(q.shape[0])
            out = functions.attend(q, k, v, self.kernel, masks.between(whole, whole))
        else:
            out = self.context.attend(q, k, v, sink, self.kernel, masks)
        return self.context.heads_to_sequence(out)[..., : self.v_head_dim].flatten(2)

    def padded(self, v: Tensor) -> Tensor:
        """Return values with the channels that the kernel needs."""
        return padded(v, self.padding)

    def masks(self, q: Tensor, info: PassInfo) -> BlockMasks:
        """Return the masks of this pass."""
        return BlockMasks(
            device=q.device,
            needs_explicit_mask=self.kernel.needs_explicit_mask,
            window=self.spec.window,
            documents=info.documents,
            dropout=self._dropout(q, info),
        )

    def _dropout(self, q: Tensor, info: PassInfo) -> Dropout | None:
        """Return the dropout rule of the local heads; None: no dropout."""
        if not self.spec.dropout or not info.is_training:
            return None
        heads = self.context.heads
        return Dropout(
            p=self.spec.dropout,
            key=self.dropout_key,
            num_heads=self.spec.num_heads,
            first_sample=info.first_sample,
            first_head=(self.tp.rank * heads.size + heads.rank) * q.shape[2],
        )

    def sink_logits(self, q: Tensor) -> Tensor | None:
        """Return the sink logit of each local head, [n], which enters the softmax denominator."""
        num_heads = q.shape[2]
        if self.spec.sink == "none":
            return None
        if self.spec.sink == "zero":
            return q.new_zeros(num_heads)
        sink = functions.weight_of(self, "sink")
        return sink[self.context.heads.rank * num_heads :][:num_heads]


def _kernel(spec: AttentionSpec, backend: str) -> AttentionKernel:
    has_kernel = backend == "triton" or (spec.softcap is None and not spec.dropout)
    return attention_kernel(backend if has_kernel else "math", spec.score_scale, spec.softcap)


def padded(v: Tensor, channels: int) -> Tensor:
    """Return values with further channels, of zeros."""
    return nn.functional.pad(v, (0, channels)) if channels else v


def _cu_seqlens(documents: Documents | None) -> CuSeqlens | None:
    if documents is None:
        return None
    lengths, longest = documents.cu_seqlens, documents.max_seqlen
    return CuSeqlens(lengths, lengths, longest, longest)


def causal_mask(s: int, documents: Documents | None, window: int | None, device: torch.device) -> Tensor:
    """Return True where query i attends to key j: j <= i, in its document and its window. Bool [b or 1, 1, s, s]."""
    mask = documents.mask if documents else torch.ones(1, 1, s, s, dtype=torch.bool, device=device).tril()
    return mask if window is None else mask.triu(-window)
