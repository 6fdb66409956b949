"""Losses that keep the loads of experts even and a router's logits small, with gradients by autograd.

    balance  E / (k T^2) * sum over experts of (sum of their score shares) * (tokens that go there)     1 where all is even
    z        mean over tokens of (log of the sum of exponentials of the logits)^2

Tokens of a micro-batch may be spread over ranks: each rank's part of a loss has the sum over its own tokens alone, but
everybody's loads and number of tokens, and the parts add up to the loss.

Sources: Fedus et al., arXiv:2101.03961 (balance); Zoph et al., arXiv:2202.08906 (z); Qiu et al., arXiv:2501.11873
(loads of the global batch).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.kernels.dtypes import wide


def balance_loss(shares: Tensor, loads: Tensor, *, top_k: int, num_tokens: int) -> Tensor:
    """This rank's part of the loss, a number; of several sequences, the mean of theirs.

    Args:
        shares: of its tokens, by `score_shares`, [t, E], or of b sequences [s, b, E].
        loads: how many of all T tokens go to each expert, [E] or [b, E]; any factor that they have is the loss's too.
        num_tokens: T, of the micro-batch or of each sequence.
    """
    sums = shares.sum(0)
    scale = shares.shape[-1] / (top_k * num_tokens**2)
    loss: Tensor = (sums * loads).sum(-1).mean() * scale
    return loss


def z_loss(logits: Tensor, *, num_tokens: int) -> Tensor:
    """This rank's part of the loss, a number: logits of its tokens [t, E], of `num_tokens` in all."""
    log_sums = logits.to(wide(logits.dtype)).logsumexp(-1)
    return log_sums.square().sum() / num_tokens


def entropy(shares: Tensor) -> Tensor:
    """Sum over tokens of -sum_e(p_e log p_e), in nats: log E where a router has no preferences."""
    total: Tensor = torch.special.entr(shares).sum()
    return total
