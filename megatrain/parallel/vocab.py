"""Cross-entropy over a vocabulary that is split over tensor ranks.

Each rank holds some columns of the logits. Three numbers a token cross the ranks: the largest logit, then the sum
of exponentials and the target's logit together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.kernels.softmax import Rows, row_statistics, rows_gradient
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
    """Losses, and what their gradient needs; wide [t] but for the columns."""

    losses: Tensor
    """Infinite for a label that is no id of the vocabulary."""
    log_sums: Tensor
    """Logarithm of the sum of the logits' exponentials."""
    rows: Rows
    columns: Tensor
    """Each label's column here; -1 where another rank holds it."""


def cross_entropy(logits: Tensor, labels: Tensor, vocab: VocabShard) -> TokenLosses:
    """Loss of each token over the whole vocabulary; uses up `logits`.

    Args:
        logits: this rank's columns, [t, v/tp]; those of padding are left out of the softmax.
        labels: ids, [t], from 0 on.
    """
    local = labels - vocab.first
    columns = local.masked_fill((local < 0) | (local >= vocab.rows), -1)
    rows = row_statistics(logits, columns, vocab.num_real)
    targets = rows.targets.masked_fill(labels >= vocab.vocab_size, float("-inf"))
    if vocab.group.size == 1:
        log_sums = rows.sums.log() + rows.largest
    else:
        # A rank that holds padding alone has the smallest number as its largest logit, and adds nothing to the sum.
        largest = all_reduce(rows.largest.clone(), vocab.group, "max")
        own = rows.sums * (rows.largest - largest).exp()
        sums, targets = all_reduce(torch.stack((own, targets)), vocab.group)
        log_sums = sums.log() + largest
    return TokenLosses(log_sums - targets, log_sums, rows, columns)


def logits_gradient(
    known: TokenLosses,
    token_scale: Tensor,
    vocab: VocabShard,
    dtype: torch.dtype,
    *,
    z_loss_coeff: float = 0.0,
) -> Tensor:
    """((1 + 2 * coefficient * log sum) * p - onehot) * scale of each token, [t, v/tp]; uses up what is known.

    That is the gradient of scale * (loss + coefficient * log sum ** 2).
    """
    share = token_scale * (1 + 2 * z_loss_coeff * known.log_sums) if z_loss_coeff else token_scale
    return rows_gradient(known.rows, known.log_sums, known.columns, share, token_scale, vocab.num_real, dtype)
