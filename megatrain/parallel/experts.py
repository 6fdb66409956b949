"""Expert parallelism: the experts of a rank, and their grouped MLP as an autograd function.

    rows ── fc1 ── activation * routing probability ── fc2 ── rows

Rows after the last end belong to no expert; their results are never read. Weight gradients bypass autograd, as in
`tensor_parallel.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.activations import Activation, activate_weighted, activate_weighted_backward
from megatrain.kernels.moe.grouped_gemm import (
    accumulate_grouped_weight_gradient,
    grouped_gemm,
    grouped_gemm_backward,
)
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.token_dispatcher import DispatchedTokens


@dataclass(frozen=True)
class ExpertParallel:
    """The ranks over which the experts of a layer are split."""

    ep: RankGroup
    """Ranks with different experts."""
    etp: RankGroup
    """Ranks that hold a slice of each expert's inner channels."""

    def own(self, num_experts: int) -> range:
        """Return the indices of the experts that this rank holds."""
        each = num_experts // self.ep.size
        return range(self.ep.rank * each, (self.ep.rank + 1) * each)


class GroupedWeight(NamedTuple):
    """The weights of this rank's experts and their gradient buffer (None where no gradients are kept)."""

    value: Tensor
    """[E/ep, o, i]."""
    grad: Tensor | None


def grouped_mlp(
    dispatched: DispatchedTokens,
    fc1: GroupedWeight,
    fc2: GroupedWeight,
    activation: Activation,
    info: PassInfo,
) -> Tensor:
    """Return the output of each row's expert times the row's routing probability: [r, h] -> [r, h].

    Args:
        fc1: [E/ep, f/etp, h], or [E/ep, 2 f/etp, h] with a gated activation.
        fc2: [E/ep, h, f/etp].
    """
    rows, ends, probs = dispatched.rows, dispatched.ends, dispatched.probs
    out: Tensor = _GroupedMlp.apply(rows, probs, ends, fc1, fc2, activation, info)
    return out


class _GroupedMlp(Function):
    """Saves the rows and the output of fc1; the backward pass recomputes the activation."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        probs: Tensor,
        ends: Tensor,
        fc1: GroupedWeight,
        fc2: GroupedWeight,
        activation: Activation,
        info: PassInfo,
    ) -> Tensor:
        inner = grouped_gemm(rows, fc1.value, ends)
        ctx.save_for_backward(rows, probs, ends, inner, fc1.value, fc2.value)
        ctx.grads, ctx.activation, ctx.info = (fc1.grad, fc2.grad), activation, info
        return grouped_gemm(activate_weighted(inner, probs, activation), fc2.value, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None, None]:
        rows, probs, ends, inner, fc1, fc2 = ctx.saved_tensors
        dy = grads[0].contiguous()
        dweighted = grouped_gemm_backward(dy, fc2, ends)
        dinner, dprobs = activate_weighted_backward(dweighted, inner, probs, ctx.activation)
        weighted = dweighted  # overwritten with the recomputed input of fc2
        drows = grouped_gemm_backward(dinner, fc1, ends)
        fc1_grad, fc2_grad = ctx.grads

        def compute() -> None:
            accumulate_grouped_weight_gradient(fc2_grad, dy, weighted, ends)
            accumulate_grouped_weight_gradient(fc1_grad, dinner, rows, ends)

        ctx.info.compute_weight_gradient(compute)
        return drows, dprobs, None, None, None, None, None
