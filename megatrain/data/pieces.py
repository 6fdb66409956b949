"""Samples cut into shorter sequences, with --seq-length-schedule.

    a sample of 8 tokens   0 1 2 3 4 5 6 7     with labels   1 2 3 4 5 6 7 8
    in pieces of 4         0 1 2 3 | 4 5 6 7                 1 2 3 4 | 5 6 7 8        positions 0 1 2 3 | 0 1 2 3

A step reads the same samples, tokens and labels as without a schedule, and attention stays within a piece. Order of samples,
consumed samples and schedules therefore know nothing of pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megatrain.data.samples.dataset import TokenSpan
from megatrain.parallel.batch import Batch
from megatrain.parallel.documents import Documents


class Batches(Protocol):
    """The micro-batches of a split."""

    def microbatches(self, consumed_samples: int, num_microbatches: int) -> list[Batch]:
        """Return this rank's micro-batches of the step after `consumed_samples`."""

    def spans(self, sample: int) -> list[TokenSpan]:
        """Return the stored token spans of a sample of the run; empty where they are not known."""

    def close(self) -> None:
        """Stop background workers."""


@dataclass(frozen=True)
class PieceLoader:
    """The micro-batches of a loader, cut.

    Args:
        loader: reads whole samples.
        num_pieces: returns the pieces of each sample in the step after a number of consumed samples.
    """

    loader: Batches
    num_pieces: Callable[[int], int]

    def microbatches(self, consumed_samples: int, num_microbatches: int) -> list[Batch]:
        """Return the micro-batches of a step, in pieces."""
        pieces = self.num_pieces(consumed_samples)
        return [cut(batch, pieces) for batch in self.loader.microbatches(consumed_samples, num_microbatches)]

    def spans(self, sample: int) -> list[TokenSpan]:
        """Return the stored token spans of a whole sample."""
        return self.loader.spans(sample)

    def close(self) -> None:
        """Stop background workers."""
        self.loader.close()


def cut(batch: Batch, pieces: int) -> Batch:
    """Cut each sample of a GPT's micro-batch into equal pieces: [b, s] -> [b * pieces, s / pieces]."""
    if pieces == 1:
        return batch
    samples, length = batch.tokens.shape
    shape = samples * pieces, length // pieces

    def rows(x: Tensor) -> Tensor:
        return x.reshape(shape)

    # Positions of documents may restart within a piece.
    positions = rows(batch.position_ids).minimum(torch.arange(shape[1], device=batch.position_ids.device))
    documents = batch.documents
    return replace(
        batch,
        tokens=rows(batch.tokens),
        labels=rows(batch.labels),
        loss_mask=rows(batch.loss_mask),
        position_ids=positions,
        documents=documents and _cut_documents(documents, *shape),
        pieces=pieces,
        denominator=batch.loss_denominator,
    )


def _cut_documents(documents: Documents, samples: int, length: int) -> Documents:
    """Return the documents that also end with each piece; a boundary that was there already adds an empty document."""
    bounds = documents.cu_seqlens
    ends = torch.arange(1, samples, dtype=bounds.dtype, device=bounds.device) * length
    return Documents(
        cu_seqlens=torch.cat((bounds, ends)).sort().values,  # without duplicates a GPU would have to wait
        max_seqlen=min(documents.max_seqlen, length),
        num_samples=samples,
        seq_length=length,
    )
