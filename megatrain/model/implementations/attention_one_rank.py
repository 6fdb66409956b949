"""Core attention of the `local` implementation on one context rank: fused kernels, with windows and documents."""

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

from megatrain.kernels.attention.blocks import Borders, View
from megatrain.kernels.attention.libraries import Flash4
from megatrain.model import functions
from megatrain.model.specs import AttentionSpec
from megatrain.parallel.batch import Documents, PassInfo, whole_samples

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
        if self.backend == "flash4":
            return self._flash4(q, k, v, info.documents)
        has_mask = info.documents is not None or self.window is not None
        if has_mask and self.backend != "sdpa":
            assert self.backend != "cudnn", "FlashAttention-2 is for windows and documents"
            return self._by_length(q, k, v, info.documents or whole_samples(q.shape[1], q.shape[0], q.device))
        mask = visible(q.shape[0], info.documents, self.window, q.device) if has_mask else None
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [b, n/tp, s, d]
        with sdpa_kernel(_TORCHS[self.backend]) if self.backend in _TORCHS else nullcontext():
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=self.has_groups
            )
        return out.permute(2, 0, 1, 3).flatten(2)

    def _flash4(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> Tensor:
        borders = None
        if documents is not None:
            of_both, longest = documents.cu_seqlens, documents.max_seqlen
            borders = Borders(of_both, of_both, longest, longest)
        view = View(is_causal=True, window=self.window, borders=borders)
        scale = self.scale if self.scale is not None else 1 / math.sqrt(q.shape[-1])
        return functions.attend(q, k, v, Flash4(scale), view).flatten(2)

    def _by_length(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        """Documents of any length laid end to end: no mask is formed."""
        s, b = q.shape[:2]
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))  # [b * s, n/tp, d]
        borders, longest = documents.cu_seqlens, documents.max_seqlen
        window = (-1 if self.window is None else self.window, 0)
        out = _torchs_by_length()(
            q, k, v, borders, borders, longest, longest, window_size=window, scale=self.scale
        )
        assert isinstance(out, Tensor)
        return out.view(b, s, -1).transpose(0, 1)


@functools.cache
def _torchs_by_length() -> Callable[..., Any]:
    """Imported when it is first needed: it brings torch's compiler, which takes seconds."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415

    # torch 2.11 takes grouped queries as they come, later versions want to be told.
    is_told = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return functools.partial(varlen_attn, enable_gqa=True) if is_told else varlen_attn


def visible(s: int, documents: Documents | None, window: int | None, device: torch.device) -> Tensor:
    """True where query i may see key j: no later, in the same document, and within the window. Bool [b or 1, 1, s, s]."""
    mask = (
        torch.ones(1, 1, s, s, dtype=torch.bool, device=device).tril()
        if documents is None
        else documents.mask
    )
    return mask if window is None else mask.triu(-window)
