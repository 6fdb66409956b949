"""Micro-batches whose tokens and labels are some positions ahead, for multi-token prediction."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatrain.parallel.batch import Batch


def with_batches_ahead(batch: Batch, count: int) -> Batch:
    """Return a micro-batch of whole samples with `ahead`: entry k has the tokens and labels of position p + k + 1 at p.

    Positions without such a token in their sample or document have token and label 0, and do not count.
    """
    documents, length = batch.documents, batch.tokens.shape[1]
    is_last = torch.arange(length, device=batch.tokens.device).expand_as(batch.tokens) == length - 1
    if documents is not None:
        is_last = is_last | (documents.document_ids != documents.document_ids.roll(-1, dims=1))

    def next_of(x: Tensor) -> Tensor:
        return x.roll(-1, dims=1).masked_fill(is_last, 0)

    found = [batch]
    for _ in range(count):
        one = found[-1]
        found.append(
            Batch(
                tokens=next_of(one.tokens),
                labels=next_of(one.labels),
                loss_mask=next_of(one.loss_mask),
                position_ids=next_of(one.position_ids),
                documents=documents,
            )
        )
    return replace(batch, ahead=tuple(found[1:]), denominator=batch.loss_denominator)
