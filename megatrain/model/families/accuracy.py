"""Predicted ids of an evaluation, from logits that are split over tensor ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.tensor_parallel import VocabShard


def vocab_parallel_argmax(logits: Tensor, vocab: VocabShard) -> Tensor:
    """Return the id of each token's largest logit, the lowest one of equals, int64 [t].

    Args:
        logits: this rank's columns, [t, v/tp]; padding does not count.
    """
    largest, columns = logits[:, : max(vocab.num_real, 1)].max(dim=-1)  # the first of equals
    ids = columns + vocab.first
    if vocab.group.size == 1:
        return ids
    if vocab.num_real == 0:
        largest = torch.full_like(largest, float("-inf"))
    is_smaller = largest < all_reduce(largest.clone(), vocab.group, "max")
    return all_reduce(ids.masked_fill(is_smaller, vocab.vocab_size), vocab.group, "min")
