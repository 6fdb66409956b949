"""Load-balancing loss and z-loss of a router, from differentiable sums over tokens.

    balance  E / (k T^2) * sum over experts of (sum of its probabilities) * (its tokens)     1 for even loads
    z        mean over tokens of (log-sum-exp of the logits)^2

The tokens of a micro-batch may be split over ranks: each rank's part of a loss uses the sum over its own tokens, and the
loads and the number of tokens of all ranks; the parts add up to the loss. On GPUs a fused kernel computes the sums.

Sources: Fedus et al., arXiv:2101.03961 (balance); Zoph et al., arXiv:2202.08906 (z); Qiu et al., arXiv:2501.11873
(loads of the global batch).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.config.model_spec.experts import ScoreFunction
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fused import routing as fused
from megatrain.kernels.fused.launching import is_fused
from megatrain.kernels.moe.routing import router_probs


class ScoreSums(NamedTuple):
    """Sums over the tokens of a rank, in the accumulation dtype."""

    probs: Tensor
    """Sums of `router_probs` over the tokens of each sample, [b, E]."""
    squares: Tensor
    """Sum of (log-sum-exp of the logits)^2, []."""
    entropy: Tensor
    """Sum of the entropies -sum_e(p_e log p_e) in nats, []; log E per token for uniform probabilities. Not differentiable."""


def score_sums(logits: Tensor, score_function: ScoreFunction, samples: int) -> ScoreSums:
    """Compute the sums that losses and metrics need: logits [s * b, E] of b samples, flattened from [s, b, E]."""
    if is_fused(logits):
        return ScoreSums(*_ScoreSums.apply(logits, score_function, samples))
    return score_sums_reference(logits, score_function, samples)


def score_sums_reference(logits: Tensor, score_function: ScoreFunction, samples: int) -> ScoreSums:
    """Compute the sums with torch operators."""
    probs = router_probs(logits, score_function)
    return ScoreSums(
        probs.unflatten(0, (-1, samples)).sum(0),
        logits.to(accumulation_dtype(logits.dtype)).logsumexp(-1).square().sum(),
        torch.special.entr(probs.detach()).sum(),
    )


class _ScoreSums(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, score_function: ScoreFunction, samples: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(logits)
        ctx.score_function, ctx.samples = score_function, samples
        ctx.set_materialize_grads(False)
        sums = fused.score_sums(logits, score_function, samples)
        entropy, squares = sums[:, -2:].sum(0).unbind()
        ctx.mark_non_differentiable(entropy)
        return sums[:, :-2], squares, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None]:
        (logits,) = ctx.saved_tensors
        dprobs, dsquares, _ = grads
        return (
            fused.score_sums_backward(dprobs, dsquares, logits, ctx.score_function, ctx.samples),
            None,
            None,
        )


def load_balancing_loss(probs: Tensor, loads: Tensor, *, top_k: int, num_tokens: int) -> Tensor:
    """Return this rank's part of the loss, []; with several sequences, the mean over them.

    Args:
        probs: sums over this rank's tokens, [E], or per sequence [b, E].
        loads: tokens per expert of all T tokens, [E] or [b, E]; a factor on them scales the loss.
        num_tokens: T, of the micro-batch or of each sequence.
    """
    scale = probs.shape[-1] / (top_k * num_tokens**2)
    loss: Tensor = (probs * loads).sum(-1).mean() * scale
    return loss


def add_loss(x: Tensor, loss: Tensor, scale: float | Tensor) -> Tensor:
    """Return x and add scale * loss to its graph: the loss receives `scale` as its gradient."""
    out: Tensor = _AddLoss.apply(x, loss, scale)
    return out


def replace_values(x: Tensor, values: Tensor) -> Tensor:
    """Return other values in place of x; the gradient passes to x unchanged."""
    out: Tensor = _ReplaceValues.apply(x, values)
    return out


class _ReplaceValues(Function):
    """Replacement of x by other values; the gradient passes to x unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:  # noqa: ARG004 (autograd's signature)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grads[0], None


class _AddLoss(Function):
    """Identity of x that adds scale * loss to the graph: the loss receives `scale` as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float | Tensor) -> Tensor:
        ctx.scale, ctx.dtype, ctx.device = scale, loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        scale = ctx.scale
        if not isinstance(scale, Tensor):
            scale = torch.full((), scale, dtype=ctx.dtype, device=ctx.device)
        return grads[0], scale.to(ctx.dtype), None
