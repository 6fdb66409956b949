"""Expert parallelism: which experts a rank holds, and how much of each; their products as an autograd function.

    rows ── fc1 ── activation, times each row's weight ── fc2 ── rows

Rows behind the last end belong to nobody; what is computed of them is never read. Weight gradients never reach autograd,
as in `tensor.py`.
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
    """How the experts of a layer are spread."""

    ep: RankGroup
    """Ranks with different experts."""
    etp: RankGroup
    """Ranks that hold a slice of each expert's inner channels."""

    def own(self, num_experts: int) -> range:
        """Numbers of the experts that this rank holds."""
        each = num_experts // self.ep.size
        return range(self.ep.rank * each, (self.ep.rank + 1) * each)


class GroupedWeight(NamedTuple):
    """The weights of this rank's experts, and where their gradients go (None where no gradients are kept)."""

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
    """What each row's expert gives, times the row's weight: [r, h] -> [r, h].

    Args:
        fc1: [E/ep, f/etp, h], behind a gate [E/ep, 2 f/etp, h].
        fc2: [E/ep, h, f/etp].
    """
    out: Tensor = _GroupedMlp.apply(
        dispatched.rows, dispatched.probs, dispatched.ends, fc1, fc2, activation, info
    )
    return out


class _GroupedMlp(Function):
    """Keeps the rows and what fc1 gives; the activation is formed again."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        ends: Tensor,
        fc1: GroupedWeight,
        fc2: GroupedWeight,
        activation: Activation,
        info: PassInfo,
    ) -> Tensor:
        inner = grouped_gemm(rows, fc1.value, ends)
        ctx.save_for_backward(rows, weights, ends, inner, fc1.value, fc2.value)
        ctx.grads, ctx.activation, ctx.info = (fc1.grad, fc2.grad), activation, info
        return grouped_gemm(activate_weighted(inner, weights, activation), fc2.value, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None, None]:
        rows, weights, ends, inner, fc1, fc2 = ctx.saved_tensors
        dy = grads[0].contiguous()
        weighted = grouped_gemm_backward(dy, fc2, ends)  # its gradient, whose place it takes
        dinner, dweights = activate_weighted_backward(weighted, inner, weights, ctx.activation)
        drows = grouped_gemm_backward(dinner, fc1, ends)
        fc1_grad, fc2_grad = ctx.grads

        def form() -> None:
            accumulate_grouped_weight_gradient(fc2_grad, dy, weighted, ends)
            accumulate_grouped_weight_gradient(fc1_grad, dinner, rows, ends)

        ctx.info.compute_weight_gradient(form)
        return drows, dweights, None, None, None, None, None
