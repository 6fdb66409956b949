"""What an implementation supplies: the leaves of a layer, cut where the fastest kernels are.

A leaf gets its ranks when it is built and `PassInfo` when it is called.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megatrain.model.specs import AttentionSpec
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.layout import ParamLayout


class NormColumnLinear(Protocol):
    """Residual addition, norm, and a column-parallel linear layer."""

    def __call__(self, hidden: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor]:
        """hidden, delta [s/tp, b, h] -> (hidden + delta, linear(norm(hidden + delta)) [s, b, o/tp])."""
        ...


class RowLinear(Protocol):
    """Row-parallel linear layer, behind an activation or not."""

    def __call__(self, x: Tensor, info: PassInfo) -> Tensor:
        """[s, b, i/tp] -> [s/tp, b, h]."""
        ...


class CoreAttention(Protocol):
    """Causal attention of this rank's heads."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, info: PassInfo) -> Tensor:
        """q [s, b, n/tp, d], k and v [s, b, g/tp, d] -> [s, b, n/tp * d]."""
        ...


class Leaves(Protocol):
    """One implementation."""

    def norm_column_linear(self, norm: ParamLayout, weight: ParamLayout) -> NormColumnLinear: ...

    def row_linear(self, weight: ParamLayout) -> RowLinear: ...

    def swiglu_row_linear(self, weight: ParamLayout) -> RowLinear: ...

    def core_attention(self, spec: AttentionSpec) -> CoreAttention: ...
