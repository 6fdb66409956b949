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
from megatrain.parallel.batch import Documents, PassInfo, is_behind, whole_samples
from megatrain.parallel.context import ContextParallel
from megatrain.parallel.layout import LaidOutModule, ParamLayout
from megatrain.parallel.tensor import TensorParallel

# torch 2.11 takes grouped queries as they come, later versions want to be told.
_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


_TORCHS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}


class LocalCoreAttention(nn.Module):
    """Scaled-dot-product attention by a fused kernel, which `backend` names as `derived.attention_backend` does.

    Of context ranks, each gathers all keys and values, and computes with its own queries.
    """

    def __init__(self, spec: AttentionSpec, backend: str, cp: ContextParallel) -> None:
        super().__init__()
        self.backend = backend
        self.has_groups = spec.num_query_groups < spec.num_heads
        self.window = spec.window
        self.scale = spec.scale
        self.cp = cp

    def forward(self, q: Tensor, k: Tensor, v: Tensor, info: PassInfo) -> Tensor:
        k, v = _whole(k, v, self.cp)
        is_square = self.cp.size == 1 and info.documents is None
        has_flash4 = self.backend == "flash4" and not is_fake(q)
        if has_flash4 and is_square:
            return self._flash4(q, k, v)
        is_causal = is_square and self.window is None
        is_narrow = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
        if has_flash4 or (is_narrow and not is_causal):
            return self._by_length(q, k, v, info.documents, _flash4_by_length if has_flash4 else _by_length)
        places = self.cp.places(q.shape[0], q.device)
        mask = None if is_causal else visible(places, k.shape[0], info.documents, self.window)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [b, n/tp, s, d]
        with sdpa_kernel(_TORCHS[self.backend]) if self.backend in _TORCHS else nullcontext():
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=self.has_groups
            )
        return out.permute(2, 0, 1, 3).flatten(2)

    def _flash4(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        window = (None, None) if self.window is None else (self.window, 0)
        out = _flash4_functions()[0](q, k, v, causal=True, softmax_scale=self.scale, window_size=window)
        return _first(out).transpose(0, 1).flatten(2)

    def _by_length(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None, kernel: Callable[..., Tensor]
    ) -> Tensor:
        """Documents of any length laid end to end: no mask is formed.

        Of each run of queries, those of a document see what it has from its start to the run's end.
        """
        s, b = k.shape[:2]
        documents = documents or whole_samples(b, s, q.device)
        outs: list[Tensor] = []
        for run in self.cp.runs(q.shape[0]):
            before = sum(map(len, outs))
            seen = range(run.stop)
            rows = (q[before : before + len(run)], k[: run.stop], v[: run.stop])
            laid = (x.transpose(0, 1).flatten(0, 1) for x in rows)  # [b * s, n/tp, d]
            lengths = [min(documents.max_seqlen, len(places)) for places in (run, seen)]
            out = kernel(
                *laid, documents.within(run), documents.within(seen), *lengths, self.window, self.scale
            )
            outs.append(out.view(b, len(run), -1).transpose(0, 1))
        return torch.cat(outs) if len(outs) > 1 else outs[0]


def _by_length(
    q: Tensor, k: Tensor, v: Tensor, borders_q: Tensor, borders_k: Tensor, longest_q: int, longest_k: int,
    window: int | None, scale: float | None,
) -> Tensor:  # fmt: skip
    """Torch's kernel; the last query of a document sees its last key."""
    reach = (-1 if window is None else window, 0)
    out = varlen_attn(
        q, k, v, borders_q, borders_k, longest_q, longest_k, window_size=reach, scale=scale, **_GROUPED
    )
    assert isinstance(out, Tensor)
    return out


def _flash4_by_length(
    q: Tensor, k: Tensor, v: Tensor, borders_q: Tensor, borders_k: Tensor, longest_q: int, longest_k: int,
    window: int | None, scale: float | None,
) -> Tensor:  # fmt: skip
    """The same by flash-attn-4."""
    how: dict[str, Any] = {"cu_seqlens_q": borders_q, "cu_seqlens_k": borders_k}
    how |= {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
    reach = (None, None) if window is None else (window, 0)
    return _first(_flash4_functions()[1](q, k, v, causal=True, softmax_scale=scale, window_size=reach, **how))


class LocalMathAttention(LaidOutModule):
    """softmax(cap(q k^T * scale), sink) v, step by step; scores and softmax are wide."""

    sink: Tensor

    def __init__(
        self,
        spec: AttentionSpec,
        sink: ParamLayout | None,
        dropout_key: int,
        tp: TensorParallel,
        cp: ContextParallel,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.scale = spec.scale if spec.scale is not None else 1 / math.sqrt(spec.head_channels)
        self.dropout_key = dropout_key
        self.tp = tp
        self.cp = cp
        if sink is not None:
            self.add_weight("sink", sink, dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, info: PassInfo) -> Tensor:
        places = self.cp.places(q.shape[0], q.device)
        k, v = (_for_each_head(x, q.shape[2]) for x in _whole(k, v, self.cp))
        s = k.shape[2]
        q = q.permute(1, 2, 0, 3)  # [b, n/tp, s, d]
        kind = wide(q.dtype)
        scores = (q.to(kind) * self.scale) @ k.to(kind).transpose(-1, -2)
        if self.spec.softcap is not None:
            scores = torch.tanh(scores / self.spec.softcap) * self.spec.softcap
        mask = visible(places, s, info.documents, self.spec.window)
        scores = scores.masked_fill(~mask, float("-inf"))
        probabilities = torch.cat((scores, self._sinks(scores)), dim=-1).softmax(-1)[..., :s]
        if self.spec.dropout and info.is_training:
            probabilities = functions.drop(probabilities, self._kept(scores, places, info), self.spec.dropout)
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

    def _kept(self, scores: Tensor, places: Tensor, info: PassInfo) -> Tensor:
        """Numbered by sample, head of the whole layer and the query's place."""
        b, n, _, s = scores.shape
        sample = torch.arange(b, device=scores.device) + info.first_sample
        head = torch.arange(n, device=scores.device) + self.tp.rank * n
        rows = (sample[:, None] * self.spec.num_heads + head)[..., None] * s
        return keep_mask(rows + places, s, key=self.dropout_key, p=self.spec.dropout)


def _for_each_head(x: Tensor, num_heads: int) -> Tensor:
    """Keys or values [s, b, g/tp, d] -> [b, n/tp, s, d], each for as many of the rank's heads."""
    return x.permute(1, 2, 0, 3).repeat_interleave(num_heads // x.shape[2], dim=1)


def _whole(k: Tensor, v: Tensor, cp: ContextParallel) -> tuple[Tensor, ...]:
    """Keys and values of all context ranks: [s/cp, b, g/tp, d] -> [s, b, g/tp, d]. They travel together."""
    if cp.size == 1:
        return k, v
    return cp.whole(torch.cat((k, v), dim=2)).chunk(2, dim=2)


def _first(out: Any) -> Tensor:
    """The output of a kernel that may return more than it."""
    out = out[0] if isinstance(out, tuple) else out
    assert isinstance(out, Tensor)
    return out


@functools.cache
def _flash4_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Of flash-attn-4, for samples and for documents; the plan takes it only where it is installed."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func  # noqa: PLC0415 (takes seconds: plans do without)

    return flash_attn_func, flash_attn_varlen_func


def visible(places: Tensor, s: int, documents: Documents | None, window: int | None) -> Tensor:
    """True where the query at places[i] may see key j of s: no later, in the same document, and within the window.

    Bool [b or 1, 1, q, s].
    """
    mask = is_behind(places, s)[None, None] if documents is None else documents.seen_from(places)
    if window is None:
        return mask
    return mask & (torch.arange(s, device=places.device) >= places[:, None] - window)
