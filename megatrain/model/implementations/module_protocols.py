"""Protocols of the modules of a layer, which an implementation supplies. Their boundaries follow the fastest kernels.

A leaf receives its ranks when it is built and `PassInfo` when it is called.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megatrain.parallel.batch import PassInfo
from megatrain.parallel.context.context_attention import ContextAttention
from megatrain.parallel.expert_parallel import DispatchedTokens


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
