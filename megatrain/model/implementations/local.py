"""Modules of the `local` implementation: torch and our own kernels, on any device, in any dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatrain.config.model_spec.norm import NormSpec
from megatrain.kernels.activations import Activation
from megatrain.kernels.sums import ColumnSums
from megatrain.model import functions
from megatrain.model.layouts import LinearLayout
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.fp8.linear import fp8_column_linear, fp8_row_linear
from megatrain.parallel.fp8.scaling import Fp8Linear
from megatrain.parallel.layout import ShardedModule
from megatrain.parallel.tensor_overlap.terms import PendingTerm
from megatrain.parallel.tensor_parallel import (
    Bias,
    TensorParallel,
    column_linear,
    row_linear,
)


class LocalNorm(ShardedModule):
    """Norm over the last dimension, in the dtype of its weight: LayerNorm with a bias, RMSNorm without."""

    def __init__(self, weights: LinearLayout, spec: NormSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.epsilon = spec.epsilon
        self.offset = 1.0 if spec.is_stored_minus_one else 0.0
        self.add_weight("weight", weights.weight, dtype)
        if weights.bias is not None:
            self.add_weight("bias", weights.bias, dtype)

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:  # noqa: ARG002 (the signature of a leaf)
        return self.add_and_norm(x, None)[1]

    def add_and_norm(
        self, hidden: Tensor, delta: Tensor | None, dy_term: PendingTerm | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return hidden + delta and its norm, whose gradient has the term `dy_term`."""
        return functions.norm(hidden, delta, self, self.epsilon, self.offset, dy_term)

    def recompute(self, total: Tensor) -> Tensor:
        """Return the norm that `add_and_norm` returned with this sum, bit for bit, without autograd."""
        return functions.recompute_norm(total, self, self.epsilon, self.offset)


class LocalColumnLinear(ShardedModule):
    """Residual addition, norm if there is one, and column-parallel linear layer."""

    weight: Tensor
    dy_sums: ColumnSums | None = None

    def __init__(
        self,
        norm: LocalNorm | CastToWeightDtype,
        linear: LinearLayout,
        tp: TensorParallel,
        dtype: torch.dtype,
        *,
        recompute_norm: bool,
        fp8: Fp8Linear | None = None,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.fp8 = fp8
        self.recompute_norm = recompute_norm
        self.norm = norm
        self.add_weight("weight", linear.weight, dtype)
        if linear.bias is not None:
            self.add_weight("bias", linear.bias, dtype)

    def forward(self, hidden: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor]:
        linear: Callable[..., Tensor]
        if self.fp8 is None and isinstance(self.norm, LocalNorm):
            dx_term = PendingTerm()
            hidden, normed = self.norm.add_and_norm(hidden, delta, dx_term)
            linear = functools.partial(column_linear, dx_term=dx_term)
        else:
            hidden, normed = self.norm.add_and_norm(hidden, delta)
            linear = column_linear if self.fp8 is None else functools.partial(fp8_column_linear, self.fp8)
        recompute_fn = (
            functools.partial(self.norm.recompute, hidden.detach()) if self.recompute_norm else None
        )
        grad, bias = self.weight_grads.get("weight"), bias_of(self)
        return hidden, linear(normed, self.weight, grad, self.tp, info, bias, recompute_fn=recompute_fn)


class CastToWeightDtype(nn.Module):
    """Cast of the residual stream to the dtype of the weights, in place of a norm."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def add_and_norm(self, hidden: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return hidden + delta, in the dtype of the residual stream and in that of the weights."""
        total = hidden if delta is None else hidden + delta
        return total, total.to(self.dtype)

    def recompute(self, total: Tensor) -> Tensor:
        return total.to(self.dtype)


class LocalRowLinear(ShardedModule):
    """Activation, if there is one, and row-parallel linear layer: [s, b, i/tp], or gated [s, b, 2 i/tp], -> [s/tp, b, h].

    The bias is added after the sum over tp.
    """

    weight: Tensor
    dy_sums: ColumnSums | None = None
    activation: Activation | None = None
    returns_partial_sums = False  # True: see `row_linear`

    def __init__(
        self, linear: LinearLayout, tp: TensorParallel, dtype: torch.dtype, fp8: Fp8Linear | None = None
    ) -> None:
        super().__init__()
        self.tp = tp
        self.fp8 = fp8
        self.add_weight("weight", linear.weight, dtype)
        if linear.bias is not None:
            self.add_weight("bias", linear.bias, dtype)

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:
        grad, bias = self.weight_grads.get("weight"), bias_of(self)
        linear: Callable[..., Tensor] = functools.partial(
            row_linear, returns_partial_sums=self.returns_partial_sums
        )
        if self.fp8 is not None:
            linear = functools.partial(fp8_row_linear, self.fp8)
        return linear(x, self.weight, grad, self.tp, info, bias, activation=self.activation)


def bias_of(layer: ShardedModule) -> Bias | None:
    bias = getattr(layer, "bias", None)
    sums = getattr(layer, "dy_sums", None)
    return None if bias is None else Bias(bias, layer.weight_grads.get("bias"), sums)
