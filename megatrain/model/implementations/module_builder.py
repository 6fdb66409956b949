"""Protocols of the modules of a layer, which an implementation supplies. Their boundaries follow the fastest kernels.

A leaf receives its ranks when it is built and `PassInfo` when it is called.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.mlp import MlpSpec
from megatrain.config.model_spec.norm import NormSpec
from megatrain.model.layouts import LinearLayout
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.context.context_attention import ContextAttention
from megatrain.parallel.expert_parallel import DispatchedTokens, ExpertParallel
from megatrain.parallel.layout import ParamLayout


class Pointwise(Protocol):
    """A module that maps each token by itself, such as a norm or dropout."""

    def __call__(self, x: Tensor, info: PassInfo) -> Tensor:
        """Map [..., h] -> [..., h]."""
        ...


class ResidualNorm(Protocol):
    """Residual addition, and the norm of the sum, or the sum itself, in the dtype of the weights."""

    def add_and_norm(self, hidden: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """Map hidden, delta [s/tp, b, h] -> (hidden + delta, norm(hidden + delta))."""
        ...


class ColumnLinear(Protocol):
    """Residual addition, norm if there is one, and column-parallel linear layer."""

    def __call__(self, hidden: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor]:
        """Map hidden, delta [s/tp, b, h] -> (hidden + delta, linear(norm(hidden + delta)) [s, b, o/tp])."""
        ...


class RowLinear(Protocol):
    """Activation, if there is one, and row-parallel linear layer."""

    def __call__(self, x: Tensor, info: PassInfo) -> Tensor:
        """Map [s, b, i/tp] -> [s/tp, b, h]."""
        ...


class GroupedMlp(Protocol):
    """This rank's experts."""

    def __call__(self, dispatched: DispatchedTokens, info: PassInfo) -> Tensor:
        """Compute the output of each row's expert, times the row's probability: [r, h] -> [r, h]."""
        ...


class CoreAttention(Protocol):
    """Causal attention of this rank's heads."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, info: PassInfo) -> Tensor:
        """Map q [s, b, n/tp, d], k and v [s, b, g/tp, d] -> [s, b, n/tp * d]."""
        ...


class AttentionToSamples(CoreAttention, Protocol):
    """Causal attention of this rank's rows and heads to keys of whole samples."""

    context: ContextAttention

    def padded(self, v: Tensor) -> Tensor:
        """Return values with the channels that the kernel needs."""
        ...


class ModuleBuilder(Protocol):
    """Builder of the modules of one implementation."""

    @property
    def attention(self) -> str:
        """Attention kernel, a value of `derived.attention_backend`."""
        ...

    def with_norms(self, spec: NormSpec) -> ModuleBuilder:
        """Return a builder whose linear layers have norms of this description."""
        ...

    def norm(self, weights: LinearLayout, spec: NormSpec) -> Pointwise:
        """Build a norm over the last dimension, which is whole on this rank."""
        ...

    def split_norm(self, weights: LinearLayout, spec: NormSpec) -> Pointwise:
        """Build an RMSNorm over the last two dimensions of [s, b, n/tp, d]."""
        ...

    def residual_norm(self, norm: LinearLayout | None) -> ResidualNorm: ...

    def column_linear(
        self, norm: LinearLayout | None, linear: LinearLayout, *, recompute_norm: bool = False
    ) -> ColumnLinear:
        """Build it. `recompute_norm`: the output of the norm is not saved; the backward pass recomputes it."""
        ...

    def replicated_linear(
        self, norm: LinearLayout | None, linear: LinearLayout, *, recompute_norm: bool = False
    ) -> ColumnLinear:
        """Build a linear layer whose weight all tensor ranks hold whole; its rows stay local: -> [s/tp, b, o]."""
        ...

    def whole_rows_linear(
        self, norm: LinearLayout | None, linear: LinearLayout, *, recompute_norm: bool = False
    ) -> ColumnLinear:
        """Build a column-parallel linear layer whose input has all rows on every tensor rank: [s, b, h] -> [s, b, o/tp]."""
        ...

    def row_linear(self, linear: LinearLayout) -> RowLinear: ...

    def activation_row_linear(self, spec: MlpSpec, linear: LinearLayout) -> RowLinear: ...

    def grouped_mlp(
        self, spec: MlpSpec, fc1: LinearLayout, fc2: LinearLayout, parallel: ExpertParallel
    ) -> GroupedMlp:
        """Build the experts of this rank."""
        ...

    def core_attention(self, spec: AttentionSpec, sink: ParamLayout | None, name: str) -> CoreAttention:
        """Build it. `name`: name of the attention layer, the key of its dropout."""
        ...

    def attention_to_samples(self, spec: AttentionSpec, name: str) -> AttentionToSamples | None:
        """Build core attention to keys of whole samples; None: context ranks exchange keys and values, or there is one."""
        ...

    def dropout(self, p: float, name: str) -> Pointwise: ...
