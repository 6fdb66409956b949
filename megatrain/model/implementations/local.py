"""The `local` implementation: torch and our own kernels, on any device, in any dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.model import functions
from megatrain.model.specs import AttentionSpec
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.layout import LaidOutModule, ParamLayout
from megatrain.parallel.tensor import TensorParallel, column_linear, row_linear


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

    def forward(self, q: Tensor, k: Tensor, v: Tensor, info: PassInfo) -> Tensor:  # noqa: ARG002 (documents come with packing)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [b, n/tp, s, d]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.has_groups)
        return out.permute(2, 0, 1, 3).flatten(2)
