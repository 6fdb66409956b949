"""Log-likelihoods of labels in an evaluation, token by token: the head notes them while it has the logits.

logits of a chunk [t, v/tp] ─> rows of labels that count ─> loss of the label, is it the largest logit?
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatrain.model.families.accuracy import vocab_parallel_argmax
from megatrain.model.head import Head
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.tensor_parallel import VocabShard, vocab_parallel_cross_entropy


class BatchScores:
    """The labels of a micro-batch; takes the place of a loss that is trained besides, see `Head`."""

    def __init__(self, head: Head, batch: Batch) -> None:
        self.head, self.shape = head, batch.labels.t().shape
        self.labels, mask = batch.labels.t().flatten(), batch.loss_mask.t().flatten()
        self.counts = mask > 0
        self.found = torch.zeros(2, len(mask), dtype=torch.float64, device=mask.device)
        """Loss of each label that counts, and 1 if it has the largest logit; 0 elsewhere."""

    def begin(self, logits: Tensor, chunk: slice, _: float) -> None:
        """Note the labels of a chunk of the tokens in order [s, b]; the logits are not changed."""
        rows = self.counts[chunk].nonzero().flatten()
        if len(rows) == 0:
            return
        at, chosen = rows + chunk.start, logits[rows]
        vocab = VocabShard(self.head.tp.group, logits.shape[1], self.head.vocab_size)
        self.found[1, at] = (vocab_parallel_argmax(chosen, vocab) == self.labels[at]).double()
        self.found[0, at] = vocab_parallel_cross_entropy(chosen, self.labels[at], vocab).losses.double()

    @property
    def values(self) -> Tensor:
        """Losses and hits of this context rank's rows, [2, b, s/cp]."""
        found: Tensor = self.found.unflatten(1, self.shape).transpose(1, 2)
        return found


@contextmanager
def noted_scores(head: Head) -> Iterator[dict[int, BatchScores]]:
    """Return the scores of the passes in the context, by the number of the micro-batch."""
    found: dict[int, BatchScores] = {}

    def note(batch: Batch, info: PassInfo) -> BatchScores:
        return found.setdefault(info.microbatch, BatchScores(head, batch))

    head.note_scores = note
    try:
        yield found
    finally:
        head.note_scores = None
