"""Core attention of the `local` implementation.

LocalCoreAttention   fused kernels, of torch and of flash-attn-4; windows and documents
LocalMathAttention   written out, with all scores in memory: softcap, sinks, dropout
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from megatrain.kernels.dropout import keep_mask
from megatrain.kernels.dtypes import wide
from megatrain.kernels.fused.launching import is_fake
from megatrain.model import functions
from megatrain.model.specs import AttentionSpec
from megatrain.parallel.batch import Documents, PassInfo
from megatrain.parallel.layout import LaidOutModule, ParamLayout
from megatrain.parallel.tensor import TensorParallel

# torch 2.11 takes grouped queries as they come, later versions want to be told.
_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


_TORCHS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}


class LocalCoreAttention(nn.Module):
    """Scaled-dot-product attention by a fused kernel, which `backend` names as `derived.attention_backend` does."""

    def __init__(self, spec: AttentionSpec, backend: str) -> None:
        super().__init__()
        self.backend = backend
        self.has_groups = spec.num_query_groups < spec.num_heads
        self.window = spec.window
        self.scale = spec.scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, info: PassInfo) -> Tensor:
        if self.backend == "flash4" and not is_fake(q):
            return self._flash4(q, k, v, info.documents)
        has_mask = info.documents is not None or self.window is not None
        if has_mask and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            return self._by_length(q, k, v, info.documents or _whole_samples(q))
        mask = visible(q.shape[0], info.documents, self.window, q.device) if has_mask else None
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [b, n/tp, s, d]
        with sdpa_kernel(_TORCHS[self.backend]) if self.backend in _TORCHS else nullcontext():
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=self.has_groups
            )
        return out.permute(2, 0, 1, 3).flatten(2)

    def _flash4(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> Tensor:
        s, b = q.shape[:2]
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        window = (None, None) if self.window is None else (self.window, 0)
        how: dict[str, Any] = {"causal": True, "softmax_scale": self.scale, "window_size": window}
        if documents is None:
            out = _flash4_functions()[0](q, k, v, **how)
        else:
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            borders, longest = documents.cu_seqlens, documents.max_seqlen
            how |= {"cu_seqlens_q": borders, "cu_seqlens_k": borders}
            how |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
            out = _flash4_functions()[1](q, k, v, **how)
        out = out[0] if isinstance(out, tuple) else out
        assert isinstance(out, Tensor)
        return out.view(b, s, -1).transpose(0, 1)

    def _by_length(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        """Documents of any length laid end to end: no mask is formed."""
        s, b = q.shape[:2]
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))  # [b * s, n/tp, d]
        borders, longest = documents.cu_seqlens, documents.max_seqlen
        window = (-1 if self.window is None else self.window, 0)
        out = varlen_attn(
            q, k, v, borders, borders, longest, longest, window_size=window, scale=self.scale, **_GROUPED
        )
        assert isinstance(out, Tensor)
        return out.view(b, s, -1).transpose(0, 1)


class LocalMathAttention(LaidOutModule):
    """softmax(cap(q k^T * scale), sink) v, step by step; scores and softmax are wide."""

    sink: Tensor

    def __init__(
        self,
        spec: AttentionSpec,
        sink: ParamLayout | None,
        dropout_key: int,
        tp: TensorParallel,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.scale = spec.scale if spec.scale is not None else 1 / math.sqrt(spec.head_channels)
        self.dropout_key = dropout_key
        self.tp = tp
        if sink is not None:
            self.add_weight("sink", sink, dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, info: PassInfo) -> Tensor:
        s = q.shape[0]
        k, v = (_for_each_head(x, q.shape[2]) for x in (k, v))
        q = q.permute(1, 2, 0, 3)  # [b, n/tp, s, d]
        kind = wide(q.dtype)
        scores = (q.to(kind) * self.scale) @ k.to(kind).transpose(-1, -2)
        if self.spec.softcap is not None:
            scores = torch.tanh(scores / self.spec.softcap) * self.spec.softcap
        mask = visible(s, info.documents, self.spec.window, q.device)
        scores = scores.masked_fill(~mask, float("-inf"))
        probabilities = torch.cat((scores, self._sinks(scores)), dim=-1).softmax(-1)[..., :s]
        if self.spec.dropout and info.is_training:
            probabilities = functions.drop(probabilities, self._kept(scores, info), self.spec.dropout)
        out = probabilities.to(q.dtype) @ v
        return out.permute(2, 0, 1, 3).flatten(2)

    def _sinks(self, scores: Tensor) -> Tensor:
        """One more score for each query, [b, n/tp, s, 1], or none, [b, n/tp, s, 0]."""
        if self.spec.sink == "none":
            return scores[..., :0]
        if self.spec.sink == "zero":
            return torch.zeros_like(scores[..., :1])
        sink = functions.as_leaf(self.sink, self.weight_grads.get("sink")).to(scores.dtype)
        return sink.view(-1, 1, 1).expand(*scores.shape[:-1], 1)

    def _kept(self, scores: Tensor, info: PassInfo) -> Tensor:
        """Numbered by sample, head of the whole layer and query."""
        b, n, s, _ = scores.shape
        sample = torch.arange(b, device=scores.device) + info.first_sample
        head = torch.arange(n, device=scores.device) + self.tp.rank * n
        rows = (sample[:, None] * self.spec.num_heads + head)[..., None] * s
        rows = rows + torch.arange(s, device=scores.device)
        return keep_mask(rows, s, key=self.dropout_key, p=self.spec.dropout)


def _for_each_head(x: Tensor, num_heads: int) -> Tensor:
    """Keys or values [s, b, g/tp, d] -> [b, n/tp, s, d], each for as many of the rank's heads."""
    return x.permute(1, 2, 0, 3).repeat_interleave(num_heads // x.shape[2], dim=1)


@functools.cache
def _flash4_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Of flash-attn-4, for samples and for documents; the plan takes it only where it is installed."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func  # noqa: PLC0415 (takes seconds: plans do without)

    return flash_attn_func, flash_attn_varlen_func


def visible(s: int, documents: Documents | None, window: int | None, device: torch.device) -> Tensor:
    """True where query i may see key j: no later, in the same document, and within the window. Bool [b or 1, 1, s, s]."""
    mask = (
        torch.ones(1, 1, s, s, dtype=torch.bool, device=device).tril()
        if documents is None
        else documents.mask
    )
    return mask if window is None else mask.triu(-window)


def _whole_samples(q: Tensor) -> Documents:
    """Each sample is a document."""
    s, b = q.shape[:2]
    borders = torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=q.device)
    return Documents(borders, s, b, s)
