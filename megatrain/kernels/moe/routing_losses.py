"""Losses that keep the loads of experts even and a router's logits small, by sums of scores that autograd works through.

    balance  E / (k T^2) * sum over experts of (sum of their score shares) * (tokens that go there)     1 where all is even
    z        mean over tokens of (log of the sum of exponentials of the logits)^2

Tokens of a micro-batch may be spread over ranks: each rank's part of a loss has the sum over its own tokens alone, but
everybody's loads and number of tokens, and the parts add up to the loss. On GPUs a fused kernel forms the sums.

Sources: Fedus et al., arXiv:2101.03961 (balance); Zoph et al., arXiv:2202.08906 (z); Qiu et al., arXiv:2501.11873
(loads of the global batch).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fused import routing as fused
from megatrain.kernels.fused.launching import is_fused
from megatrain.kernels.moe.routing import ScoreFunction, router_probs


class ScoreSums(NamedTuple):
    """Sums over the tokens of a rank, wide."""

    shares: Tensor
    """Of the tokens of each sample, by `router_probs`: [b, E]."""
    squares: Tensor
    """Of (log of the sum of exponentials of the logits)^2, a number."""
    entropy: Tensor
    """Of -sum_e(p_e log p_e) of the shares, in nats: log E where a router has no preferences. A number without gradient."""


def score_sums(logits: Tensor, score_function: ScoreFunction, samples: int) -> ScoreSums:
    """What losses and reports need of all scores: logits [s * b, E] of b samples, whose tokens take turns."""
    if is_fused(logits):
        return ScoreSums(*_ScoreSums.apply(logits, score_function, samples))
    return score_sums_reference(logits, score_function, samples)


def score_sums_reference(logits: Tensor, score_function: ScoreFunction, samples: int) -> ScoreSums:
    """The same, written out."""
    shares = router_probs(logits, score_function)
    return ScoreSums(
        shares.unflatten(0, (-1, samples)).sum(0),
        logits.to(accumulation_dtype(logits.dtype)).logsumexp(-1).square().sum(),
        torch.special.entr(shares.detach()).sum(),
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
        dshares, dsquares, _ = grads
        return (
            fused.score_sums_backward(dshares, dsquares, logits, ctx.score_function, ctx.samples),
            None,
            None,
        )


def load_balancing_loss(shares: Tensor, loads: Tensor, *, top_k: int, num_tokens: int) -> Tensor:
    """This rank's part of the loss, a number; of several sequences, the mean of theirs.

    Args:
        shares: sums over its tokens, [E], or those of b sequences [b, E].
        loads: how many of all T tokens go to each expert, [E] or [b, E]; any factor that they have is the loss's too.
        num_tokens: T, of the micro-batch or of each sequence.
    """
    scale = shares.shape[-1] / (top_k * num_tokens**2)
    loss: Tensor = (shares * loads).sum(-1).mean() * scale
    return loss
