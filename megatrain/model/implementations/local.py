"""The `local` implementation: torch and our own kernels, on any device, in any dtype."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatrain.kernels import activations
from megatrain.kernels.activations import Activation, Curve
from megatrain.kernels.dropout import keep_mask
from megatrain.kernels.normal import stream_key
from megatrain.model import functions
from megatrain.model.implementations.attention_context import LocalContextAttention
from megatrain.model.implementations.attention_one_rank import LocalCoreAttention
from megatrain.model.implementations.leaves import CoreAttention, Pointwise
from megatrain.model.layouts import Weights
from megatrain.model.specs import AttentionSpec, MlpSpec, NormSpec
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.context import ContextParallel
from megatrain.parallel.context_attention import ContextAttention
from megatrain.parallel.experts import GroupedWeight, grouped_mlp
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.layout import LaidOutModule, ParamLayout
from megatrain.parallel.tensor import Bias, TensorParallel, activated_row_linear, column_linear, row_linear
from megatrain.parallel.token_dispatcher import Visitors
from megatrain.parallel.tokens import TokenSplit


@dataclass(frozen=True)
class LocalLeaves:
    """Builds the leaves for one rank."""

    tp: TensorParallel
    cp: ContextParallel
    dtype: torch.dtype
    norms: NormSpec
    seed: int
    """Of dropout."""
    attention: str = "sdpa"
    """Kernel of attention, as `derived.attention_backend` names it."""
    attention_over: ContextAttention | None = None
    """How attention reaches across the ranks of `cp`; None: around a ring of them."""

    def norm(self, weights: Weights, spec: NormSpec) -> LocalNorm:
        return LocalNorm(weights, spec, self.dtype)

    def split_norm(self, weights: Weights, spec: NormSpec) -> LocalSplitRmsNorm:
        return LocalSplitRmsNorm(weights, spec, self.dtype, self.tp)

    def column_linear(
        self, norm: Weights | None, linear: Weights, *, forms_norm_again: bool = False
    ) -> LocalColumnLinear:
        own = self.residual_norm(norm)
        return LocalColumnLinear(self, own, linear, forms_norm_again=forms_norm_again)

    def residual_norm(self, norm: Weights | None) -> LocalNorm | LocalNarrowing:
        return LocalNarrowing(self.dtype) if norm is None else self.norm(norm, self.norms)

    def grouped_mlp(self, spec: MlpSpec, fc1: ParamLayout, fc2: ParamLayout, num_own: int) -> LocalGroupedMlp:
        return LocalGroupedMlp(_activation(spec), fc1, fc2, num_own, self.dtype)

    def row_linear(self, linear: Weights) -> LocalRowLinear:
        return LocalRowLinear(self, linear)

    def activation_row_linear(self, spec: MlpSpec, linear: Weights) -> LocalRowLinear:
        return LocalActivationRowLinear(self, linear, _activation(spec))

    def core_attention(self, spec: AttentionSpec, sink: ParamLayout | None, name: str) -> CoreAttention:
        is_plain = spec.softcap is None and spec.sink == "none" and not spec.dropout
        if is_plain and self.attention != "math" and self.cp.size == 1:
            return LocalCoreAttention(spec, self.attention)
        key = stream_key(self.seed, f"{name}.dropout")
        over = self.attention_over or ContextAttention(RankGroup("heads", (0,), 0), self.cp)
        return LocalContextAttention(spec, sink, key, self.tp, over, self.attention, self.dtype)

    def dropout(self, p: float, name: str) -> Pointwise:
        return LocalDropout(p, stream_key(self.seed, f"{name}.dropout"), self.tp, self.cp)


_CURVES: dict[str, Curve] = {
    "swiglu": activations.SILU,
    "geglu_tanh": activations.GELU_TANH,
    "quick_geglu": activations.QUICK_GELU,
    "gelu": activations.GELU,
    "gelu_tanh": activations.GELU_TANH,
    "squared_relu": activations.SQUARED_RELU,
}


def _activation(spec: MlpSpec) -> Activation:
    curve = spec.curve or _CURVES[spec.activation]
    return Activation(curve=curve, is_gated=spec.is_gated, clamp=spec.clamp, offset=spec.offset)


class LocalNorm(LaidOutModule):
    """Norm over the last dimension, in the dtype of its weight: LayerNorm with a bias, RMSNorm without."""

    def __init__(self, weights: Weights, spec: NormSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.epsilon = spec.epsilon
        self.offset = 1.0 if spec.is_stored_minus_one else 0.0
        self.add_weight("weight", weights.weight, dtype)
        if weights.bias is not None:
            self.add_weight("bias", weights.bias, dtype)

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:  # noqa: ARG002 (a leaf gets it)
        return self.of_sum(x, None)[1]

    def of_sum(self, hidden: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """hidden + delta, and its norm."""
        return functions.norm(hidden, delta, self, self.epsilon, self.offset)

    def again(self, total: Tensor) -> Tensor:
        """The norm that `of_sum` gave with this sum, to the last bit, without a gradient."""
        return functions.norm_again(total, self, self.epsilon, self.offset)


class LocalSplitRmsNorm(LocalNorm):
    """RMSNorm over all heads: [s, b, n/tp, d], with a sum over the ranks."""

    def __init__(self, weights: Weights, spec: NormSpec, dtype: torch.dtype, tp: TensorParallel) -> None:
        super().__init__(weights, spec, dtype)
        self.tp = tp

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:  # noqa: ARG002
        normed = functions.split_rms_norm(x.flatten(2), self, self.epsilon, self.offset, self.tp.group)
        return normed.view_as(x)


class LocalColumnLinear(LaidOutModule):
    """Residual addition, norm or none, and a column-parallel linear layer."""

    weight: Tensor

    def __init__(
        self,
        leaves: LocalLeaves,
        norm: LocalNorm | LocalNarrowing,
        linear: Weights,
        *,
        forms_norm_again: bool,
    ) -> None:
        super().__init__()
        self.tp = leaves.tp
        self.forms_norm_again = forms_norm_again
        self.norm = norm
        self.add_weight("weight", linear.weight, leaves.dtype)
        if linear.bias is not None:
            self.add_weight("bias", linear.bias, leaves.dtype)

    def forward(self, hidden: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor]:
        hidden, normed = self.norm.of_sum(hidden, delta)
        again = functools.partial(self.norm.again, hidden.detach()) if self.forms_norm_again else None
        grad, bias = self.weight_grads.get("weight"), _bias_of(self)
        return hidden, column_linear(normed, self.weight, grad, self.tp, info, bias, again=again)


class LocalNarrowing(nn.Module):
    """Stands where a norm would: the residual stream in the dtype of the weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def of_sum(self, hidden: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """hidden + delta, wide and narrow."""
        total = hidden if delta is None else hidden + delta
        return total, total.to(self.dtype)

    def again(self, total: Tensor) -> Tensor:
        """See `LocalNorm.again`."""
        return total.to(self.dtype)


class LocalRowLinear(LaidOutModule):
    """Row-parallel linear layer. Its bias is added once the ranks' parts are summed."""

    weight: Tensor

    def __init__(self, leaves: LocalLeaves, linear: Weights) -> None:
        super().__init__()
        self.tp = leaves.tp
        self.add_weight("weight", linear.weight, leaves.dtype)
        if linear.bias is not None:
            self.add_weight("bias", linear.bias, leaves.dtype)

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:
        return row_linear(x, self.weight, self.weight_grads.get("weight"), self.tp, info, _bias_of(self))


class LocalActivationRowLinear(LocalRowLinear):
    """The same behind an activation: [s, b, f/tp], gated [s, b, 2 f/tp] -> [s/tp, b, h]."""

    def __init__(self, leaves: LocalLeaves, linear: Weights, activation: Activation) -> None:
        super().__init__(leaves, linear)
        self.activation = activation

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:
        grad, bias = self.weight_grads.get("weight"), _bias_of(self)
        return activated_row_linear(x, self.weight, grad, self.activation, self.tp, info, bias)


class LocalGroupedMlp(LaidOutModule):
    """This rank's experts, whose weights are stacked by rows: [e f/etp, h], behind a gate [e 2 f/etp, h], and [e h, f/etp]."""

    fc1: Tensor
    fc2: Tensor

    def __init__(
        self, activation: Activation, fc1: ParamLayout, fc2: ParamLayout, num_own: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.activation = activation
        self.num_own = num_own
        self.add_weight("fc1", fc1, dtype)
        self.add_weight("fc2", fc2, dtype)

    def forward(self, visitors: Visitors, info: PassInfo) -> Tensor:
        return grouped_mlp(visitors, self._weight("fc1"), self._weight("fc2"), self.activation, info)

    def _weight(self, name: str) -> GroupedWeight:
        value, grad = getattr(self, name), self.weight_grads.get(name)
        stacked = (self.num_own, -1, value.shape[1])
        return GroupedWeight(value.view(stacked), None if grad is None else grad.view(stacked))


def _bias_of(layer: LaidOutModule) -> Bias | None:
    bias = getattr(layer, "bias", None)
    return None if bias is None else Bias(bias, layer.weight_grads.get("bias"))


class LocalDropout(nn.Module):
    """Dropout of this rank's rows of the sequence, [s/(cp tp), b, h], as one rank would draw it for all."""

    def __init__(self, p: float, key: int, tp: TensorParallel, cp: ContextParallel) -> None:
        super().__init__()
        self.p = p
        self.key = key
        self.split = TokenSplit(tp, cp)

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:
        if not info.is_training:
            return x
        rows, samples, channels = x.shape
        tokens = self.split.numbers(rows, samples, first_sample=info.first_sample, device=x.device)
        return functions.drop(x, keep_mask(tokens, channels, key=self.key, p=self.p), self.p)
