"""What an implementation supplies: the leaves of a layer, cut where the fastest kernels are.

A leaf gets its ranks when it is built and `PassInfo` when it is called.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megatrain.model.layouts import Weights
from megatrain.model.specs import AttentionSpec, MlpSpec, NormSpec
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.layout import ParamLayout


class Pointwise(Protocol):
    """What changes tokens one by one, such as a norm or dropout."""

    def __call__(self, x: Tensor, info: PassInfo) -> Tensor:
        """x and the result alike in shape."""
        ...


class ColumnLinear(Protocol):
    """Residual addition, norm or none, and a column-parallel linear layer."""

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

    def norm(self, weights: Weights, spec: NormSpec) -> Pointwise:
        """Norm over the last dimension, whole on this rank."""
        ...

    def split_norm(self, weights: Weights, spec: NormSpec) -> Pointwise:
        """RMSNorm over the last two dimensions, [s, b, n/tp, d], of which the first is split over the ranks."""
        ...

    def column_linear(
        self, norm: Weights | None, linear: Weights, *, forms_norm_again: bool = False
    ) -> ColumnLinear:
        """`forms_norm_again`: what the norm gives is not kept; the backward pass forms it again."""
        ...

    def row_linear(self, linear: Weights) -> RowLinear: ...

    def activation_row_linear(self, spec: MlpSpec, linear: Weights) -> RowLinear: ...

    def core_attention(self, spec: AttentionSpec, sink: ParamLayout | None, name: str) -> CoreAttention:
        """`name`: of the attention layer, by which dropout draws."""
        ...

    def dropout(self, p: float, name: str) -> Pointwise: ...
