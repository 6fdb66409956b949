"""The `local` implementation: torch and our own kernels, on any device, in any dtype."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from megatrain.model import functions
from megatrain.model.specs import AttentionSpec
from megatrain.parallel.batch import Documents, PassInfo
from megatrain.parallel.layout import LaidOutModule, ParamLayout
from megatrain.parallel.tensor import TensorParallel, column_linear, row_linear

# torch 2.11 takes grouped queries as they come, later versions want to be told.
_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


@dataclass(frozen=True)
class LocalLeaves:
    """Builds the leaves for one rank."""

    tp: TensorParallel
    dtype: torch.dtype
    norm_epsilon: float

    def norm_column_linear(self, norm: ParamLayout, weight: ParamLayout) -> LocalNormColumnLinear:
        return LocalNormColumnLinear(self, norm, weight)

    def row_linear(self, weight: ParamLayout) -> LocalRowLinear:
        return LocalRowLinear(self, weight)

    def swiglu_row_linear(self, weight: ParamLayout) -> LocalSwigluRowLinear:
        return LocalSwigluRowLinear(self, weight)

    def core_attention(self, spec: AttentionSpec) -> LocalCoreAttention:
        return LocalCoreAttention(spec)


class LocalNormColumnLinear(LaidOutModule):
    """Residual addition, RMSNorm and a column-parallel linear layer."""

    norm: Tensor
    weight: Tensor

    def __init__(self, leaves: LocalLeaves, norm: ParamLayout, weight: ParamLayout) -> None:
        super().__init__()
        self.leaves = leaves
        self.add_weight("norm", norm, leaves.dtype)
        self.add_weight("weight", weight, leaves.dtype)

    def forward(self, hidden: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor]:
        if delta is not None:
            hidden = hidden + delta
        eps = self.leaves.norm_epsilon
        normed = functions.rms_norm(hidden, self.norm, self.weight_grads.get("norm"), eps, info)
        out = column_linear(normed, self.weight, self.weight_grads.get("weight"), self.leaves.tp, info)
        return hidden, out


class LocalRowLinear(LaidOutModule):
    """Row-parallel linear layer."""

    weight: Tensor

    def __init__(self, leaves: LocalLeaves, weight: ParamLayout) -> None:
        super().__init__()
        self.tp = leaves.tp
        self.add_weight("weight", weight, leaves.dtype)

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:
        return row_linear(x, self.weight, self.weight_grads.get("weight"), self.tp, info)


class LocalSwigluRowLinear(LocalRowLinear):
    """The same behind a gated activation: [s, b, 2 f/tp] -> [s/tp, b, h]."""

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:
        return super().forward(functions.swiglu(x), info)


class LocalCoreAttention(torch.nn.Module):
    """torch's scaled-dot-product attention."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.has_groups = spec.num_query_groups < spec.num_heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor, info: PassInfo) -> Tensor:
        if info.documents is not None and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            return self._by_length(q, k, v, info.documents)
        mask = info.documents.mask if info.documents is not None else None
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [b, n/tp, s, d]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.has_groups
        )
        return out.permute(2, 0, 1, 3).flatten(2)

    def _by_length(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        """Documents of any length laid end to end: no mask is formed."""
        s, b = q.shape[:2]
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))  # [b * s, n/tp, d]
        borders, longest = documents.cu_seqlens, documents.max_seqlen
        out = varlen_attn(q, k, v, borders, borders, longest, longest, window_size=(-1, 0), **_GROUPED)
        assert isinstance(out, Tensor)
        return out.view(b, s, -1).transpose(0, 1)
