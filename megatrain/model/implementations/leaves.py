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
from megatrain.parallel.token_dispatcher import Visitors


class Pointwise(Protocol):
    """What changes tokens one by one, such as a norm or dropout."""

    def __call__(self, x: Tensor, info: PassInfo) -> Tensor:
        """x and the result alike in shape."""
        ...


class ResidualNorm(Protocol):
    """Residual addition, and the norm of the sum or the sum itself, in the dtype of the weights."""

    def of_sum(self, hidden: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """hidden, delta [s/tp, b, h] -> (hidden + delta, norm(hidden + delta))."""
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


class GroupedMlp(Protocol):
    """This rank's experts."""

    def __call__(self, visitors: Visitors, info: PassInfo) -> Tensor:
        """What each row's expert gives, times the row's weight: [r, h] -> [r, h]."""
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

    def residual_norm(self, norm: Weights | None) -> ResidualNorm: ...

    def column_linear(
        self, norm: Weights | None, linear: Weights, *, forms_norm_again: bool = False
    ) -> ColumnLinear:
        """`forms_norm_again`: what the norm gives is not kept; the backward pass forms it again."""
        ...

    def row_linear(self, linear: Weights) -> RowLinear: ...

    def activation_row_linear(self, spec: MlpSpec, linear: Weights) -> RowLinear: ...

    def grouped_mlp(self, spec: MlpSpec, fc1: ParamLayout, fc2: ParamLayout, num_own: int) -> GroupedMlp:
        """`num_own`: how many experts this rank holds."""
        ...

    def core_attention(self, spec: AttentionSpec, sink: ParamLayout | None, name: str) -> CoreAttention:
        """`name`: of the attention layer, by which dropout draws."""
        ...

    def dropout(self, p: float, name: str) -> Pointwise: ...
