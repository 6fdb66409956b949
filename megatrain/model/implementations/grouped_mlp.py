"""The experts of a rank as one module, which grouped products compute."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.activations import Activation, activate_weighted, activate_weighted_backward
from megatrain.kernels.moe.grouped_bias import (
    accumulate_grouped_bias_gradient,
    add_grouped_bias,
    grouped_bias_weight_gradient,
)
from megatrain.kernels.moe.grouped_gemm import GroupedProducts, accumulate_grouped_weight_gradient
from megatrain.model.layouts import LinearLayout
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.expert_parallel import Deferred, DispatchedTokens, ExpertParallel
from megatrain.parallel.layout import ShardedModule
from megatrain.parallel.tensor_parallel import Bias


class LocalGroupedMlp(ShardedModule):
    """This rank's e experts, stacked by rows: fc1 [e f/etp, h], or gated [e 2 f/etp, h], and fc2 [e h, f/etp]."""

    fc1: Tensor
    fc2: Tensor
    products = GroupedProducts()

    def __init__(
        self,
        activation: Activation,
        fc1: LinearLayout,
        fc2: LinearLayout,
        parallel: ExpertParallel,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.num_local_experts = fc1.weight.num_matrices
        self.adds_output_bias = parallel.etp.is_first
        for name, weights in (("fc1", fc1), ("fc2", fc2)):
            self.add_weight(name, weights.weight, dtype)
            if weights.bias is not None:
                self.add_weight(f"{name}_bias", weights.bias, dtype)

    def forward(self, dispatched: DispatchedTokens, info: PassInfo) -> Tensor:
        """Return the output of each row's expert times the row's routing probability: [r, h] -> [r, h]."""
        fc1, fc2 = map(self.weight_of, ("fc1", "fc2"))
        # The outputs of the ranks of etp are summed.
        fc2 = fc2 if self.adds_output_bias else fc2._replace(bias=None)
        rows, ends, probs, _, deferred, _ = dispatched
        operations = (self.activation, self.products)
        out: Tensor = _GroupedMlp.apply(rows, probs, ends, fc1, fc2, *operations, info, deferred)
        return out

    def weight_of(self, name: str) -> GroupedWeight:
        """Return the weight and the bias of fc1 or fc2, expert by expert."""
        return GroupedWeight(*self._stacked(name), self._bias(f"{name}_bias"))

    def _bias(self, name: str) -> Bias | None:
        return Bias(*self._stacked(name)) if name in self.layouts else None

    def _stacked(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Return a parameter and its gradient buffer, expert by expert: [e, o, i] or [e, o]."""
        value, grad = getattr(self, name), self.weight_grads.get(name)
        shape = (self.num_local_experts, -1, *value.shape[1:])
        return value.view(shape), None if grad is None else grad.view(shape)


class GroupedWeight(NamedTuple):
    """The weights of this rank's experts and their gradient buffer (None where no gradients are kept)."""

    value: Tensor
    """[E/ep, o, i]."""
    grad: Tensor | None
    bias: Bias | None = None
    """[E/ep, o]; None: none."""


class _GroupedMlp(Function):
    """Saves the rows, or their FP8 codes, and the output of fc1; recomputes the activation.

    Weight gradients bypass autograd: they are accumulated while the gradient of the rows is sent, or when the schedule says so.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        probs: Tensor,
        ends: Tensor,
        fc1: GroupedWeight,
        fc2: GroupedWeight,
        activation: Activation,
        products: GroupedProducts,
        info: PassInfo,
        deferred: Deferred | None,
    ) -> Tensor:
        cast = products.cast(rows)
        inner = products.fc1(cast, fc1.value, ends, info)
        if fc1.bias is not None:
            add_grouped_bias(inner, fc1.bias.value, ends)
        ctx.save_for_backward(probs, ends, inner, fc1.value, fc2.value, *products.saved(rows, cast))
        ctx.grads, ctx.biases = (fc1.grad, fc2.grad), (fc1.bias, fc2.bias)
        ctx.activation, ctx.info, ctx.deferred, ctx.products = activation, info, deferred, products
        out = products.fc2(activate_weighted(inner, probs, activation, ends), fc2.value, ends, info)
        return out if fc2.bias is None else add_grouped_bias(out, fc2.bias.value, ends, probs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        probs, ends, inner, fc1, fc2, *saved = ctx.saved_tensors
        dy = grads[0].contiguous()
        dweighted = ctx.products.fc2_backward(dy, fc2, ends)
        dinner, dprobs = activate_weighted_backward(dweighted, inner, probs, ctx.activation, ends)
        weighted = dweighted  # overwritten with the recomputed input of fc2
        drows = ctx.products.fc1_backward(dinner, fc1, ends)
        fc1_grad, fc2_grad = ctx.grads
        fc1_bias, fc2_bias = ctx.biases
        if fc2_bias is not None:
            dprobs += grouped_bias_weight_gradient(dy, fc2_bias.value, ends).to(dprobs.dtype)

        def compute() -> None:
            accumulate_grouped_weight_gradient(fc2_grad, dy, weighted, ends)
            rows = ctx.products.restored(saved, dy.dtype)
            accumulate_grouped_weight_gradient(fc1_grad, dinner, rows, ends)
            if fc2_bias is not None:
                accumulate_grouped_bias_gradient(fc2_bias.grad, dy, ends, probs)
            if fc1_bias is not None:
                accumulate_grouped_bias_gradient(fc1_bias.grad, dinner, ends)

        if ctx.deferred is not None and ctx.info.deferred is None and ctx.needs_input_grad[0]:
            ctx.deferred.append(compute)
        else:
            ctx.info.compute_weight_gradient(compute)
        return drows, dprobs, *[None] * 7
