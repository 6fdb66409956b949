"""Packs of parity's samples: each sample, up to its last token that counts, is a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from megatrain.data.samples.dataset import Sample, TokenSpan
from megatrain.data.samples.pack_loader import PackLoader
from megatrain.parallel.batch import Batch
from megatrain.parallel.packs.schedule import PackCosts
from megatrain.training.engine import Engine
from megatrain.training.planning.packs import pack_settings

_COSTS: Final = PackCosts(pair=0.01, sent=0.3)
"""With these, groups of all sizes work in one step; with those of a tiny model, packs of one rank would do."""


@dataclass(frozen=True)
class CutSamples:
    """A dataset of cut samples. Implements `SampleDataset`."""

    samples: tuple[Sample, ...]

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> CutSamples:
        """Cut micro-batches of one sample each."""
        return cls(tuple(map(_cut, batches)))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, k: int) -> Sample:
        return self.samples[k]

    def spans(self, k: int) -> list[TokenSpan]:
        return [TokenSpan("parity", k, k, 0, len(self.samples[k].tokens))]


def _cut(batch: Batch) -> Sample:
    length = int(batch.loss_mask[0].nonzero()[-1]) + 1
    arrays = (x[0, :length].numpy() for x in (batch.tokens, batch.labels, batch.loss_mask))
    tokens, labels, mask = arrays
    return Sample(tokens, labels, mask, np.arange(length), np.zeros(1, np.int64))


def packed_batches(engine: Engine, documents: CutSamples, first: int, count: int) -> list[Batch]:
    """Return this rank's packs of `count` documents."""
    settings = replace(pack_settings(engine.plan), costs=_COSTS)
    rank = engine.grid.replicas.rank
    loader = PackLoader(documents, len(documents), settings, rank=rank, device=engine.device, num_workers=0)
    return loader.microbatches(first, count // settings.documents_per_pass)
