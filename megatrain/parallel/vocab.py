"""Cross-entropy over a vocabulary that is split over tensor ranks.

Each rank holds some columns of the logits. Three numbers a token cross the ranks: the largest logit, then the sum
of exponentials and the target's logit together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.kernels.elementwise import wide
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.grid import RankGroup


@dataclass(frozen=True)
class VocabShard:
    """Which ids this rank holds: `rows` of them from `first` on, of which those from `vocab_size` on are padding."""

    group: RankGroup
    rows: int
    vocab_size: int

    @property
    def first(self) -> int:
        return self.group.rank * self.rows

    @property
    def num_real(self) -> int:
        """How many of the rows are ids of the tokenizer."""
        return min(max(self.vocab_size - self.first, 0), self.rows)


class TokenLosses(NamedTuple):
    """Losses, and what their gradient needs; wide tensors."""

    losses: Tensor
    """[t]; infinite for a label that is no id of the vocabulary."""
    log_sums: Tensor
    """Logarithm of the sum of the logits' exponentials, [t]."""
    probabilities: Tensor
    """Of this rank's ids, [t, v/tp]; zero for padding."""
    columns: Tensor
    """Each label's column here, [t]; 0 where the label is elsewhere."""
    is_elsewhere: Tensor
    """Whether another rank holds the label, bool [t]."""


def cross_entropy(logits: Tensor, labels: Tensor, vocab: VocabShard) -> TokenLosses:
    """Loss of each token over the whole vocabulary; uses up `logits`.

    Args:
        logits: this rank's columns, [t, v/tp]; those of padding are left out of the softmax.
        labels: ids, [t], from 0 on.
    """
    local = labels - vocab.first
    is_elsewhere = (local < 0) | (local >= vocab.rows)
    local = local.masked_fill(is_elsewhere, 0)
    wide_logits = logits.to(wide(logits.dtype))
    if vocab.num_real < vocab.rows:
        wide_logits[:, vocab.num_real :] = float("-inf")
    # A rank that holds padding alone has -inf as its largest logit, which the maximum over the ranks replaces.
    largest = all_reduce(wide_logits.max(dim=-1).values, vocab.group, "max")
    shifted = wide_logits.sub_(largest[:, None])
    target = shifted.gather(1, local[:, None]).squeeze(1).masked_fill(is_elsewhere, 0)
    target.masked_fill_(labels >= vocab.vocab_size, float("-inf"))
    exponentials = shifted.exp_()
    sums = all_reduce(torch.stack((exponentials.sum(dim=-1), target)), vocab.group)
    log_sums = sums[0].log()
    return TokenLosses(
        log_sums - sums[1], log_sums + largest, exponentials.div_(sums[0][:, None]), local, is_elsewhere
    )


def logits_gradient(
    known: TokenLosses, token_scale: Tensor, dtype: torch.dtype, *, z_loss_coeff: float = 0.0
) -> Tensor:
    """((1 + 2 * coefficient * log sum) * p - onehot) * scale of each token, [t, v/tp]; uses up the probabilities.

    That is the gradient of scale * (loss + coefficient * log sum ** 2).
    """
    share = token_scale * (1 + 2 * z_loss_coeff * known.log_sums) if z_loss_coeff else token_scale
    gradient = known.probabilities.mul_(share[:, None])
    minus = token_scale.masked_fill(known.is_elsewhere, 0).neg()
    gradient.scatter_add_(1, known.columns[:, None], minus[:, None])
    return gradient.to(dtype)
