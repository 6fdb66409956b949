"""The packs of a rank: the documents of a global batch, scheduled over the ranks of dp and cp, each read by the ranks that need it.

    consumed samples ─> lengths of the global batch, from the index ─> schedule ─> this rank's packs ─> PackBatch

Every rank computes the schedule of all ranks. The next step is read in the background.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from megatrain.data.samples.dataset import Sample, lengths_of
from megatrain.data.samples.loader import require_samples, set_device
from megatrain.parallel.documents import Documents
from megatrain.parallel.packs.context import PackBatch, StepWork
from megatrain.parallel.packs.schedule import Integers, Pack, PackCosts, PackDomain, Scheduler

if TYPE_CHECKING:
    from megatrain.data.samples.dataset import SampleDataset, TokenSpan


@dataclass(frozen=True, kw_only=True)
class PackSettings:
    """The distribution of packs, equal on all ranks."""

    scheduler: Scheduler
    costs: PackCosts
    domain: PackDomain
    seq_length: int
    """Most tokens of a sample."""
    documents_per_pass: int
    """Documents of the global batch that one of the planned micro-batches counts for."""


class PackLoader:
    """The packs of one rank of the domain.

    Args:
        samples: documents.
        num_samples: number of samples of the split.
        rank: of this rank in the domain.
        num_workers: 0: each step reads its samples when they are requested.
    """

    def __init__(
        self,
        samples: SampleDataset,
        num_samples: int,
        settings: PackSettings,
        *,
        rank: int,
        device: torch.device,
        num_workers: int,
    ) -> None:
        self._samples, self._num_samples, self._settings, self._rank = samples, num_samples, settings, rank
        self._device = device
        self._threads = None
        if num_workers:
            self._threads = ThreadPoolExecutor(1, "packs", initializer=set_device, initargs=(device,))
        self._prefetched: tuple[tuple[int, int], Future[list[PackBatch]]] | None = None

    def microbatches(self, consumed_samples: int, num_microbatches: int) -> list[Any]:
        """Return this rank's packs, on the device, of the step after `consumed_samples`.

        Args:
            num_microbatches: each stands for `documents_per_pass` documents of the global batch.

        Raises:
            MegatrainError: the step needs samples after the last one.
        """
        step = (consumed_samples, num_microbatches * self._settings.documents_per_pass)
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and prefetched[0] == step:
            batches = prefetched[1].result()
        else:
            batches = self._read(*step)
        following = (consumed_samples + step[1], step[1])
        moved = [batch.mapped(lambda x: x.to(self._device, non_blocking=True)) for batch in batches]
        if self._threads is not None and sum(following) <= self._num_samples:
            self._prefetched = following, self._threads.submit(self._read, *following)
        return moved

    def schedule(self, first: int, count: int) -> tuple[Integers, list[Pack]]:
        """Return the lengths of a global batch, and its packs.

        Raises:
            MegatrainError: there are not so many samples.
        """
        require_samples(first, first + count, self._num_samples)
        lengths = lengths_of(self._samples, np.arange(first, first + count)).astype(np.int64, copy=False)
        settings = self._settings
        return lengths, settings.scheduler(lengths, settings.costs, settings.domain)

    def spans(self, sample: int) -> list[TokenSpan]:
        """Return the stored token spans of a sample of the run."""
        return self._samples.spans(sample) if sample < self._num_samples else []

    def close(self) -> None:
        """Stop the background thread."""
        self._prefetched = None
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def _read(self, first: int, count: int) -> list[PackBatch]:
        """Read this rank's packs; a rank without one, or with fewer than others if that matters, gets empty ones."""
        lengths, packs = self.schedule(first, count)
        work = StepWork(num_tokens=int(lengths.sum()), sum_of_squared_lengths=int((lengths**2).sum()))
        domain = self._settings.domain
        passes = [[pack for pack in packs if rank in pack.ranks] for rank in range(domain.num_ranks)]
        most = max(map(len, passes))
        empty = Pack(self._rank, 1, (), 0)
        own, rows = passes[self._rank] or [empty], [0] * most
        if domain.filler_length:
            of_passes = itertools.zip_longest(*passes, fillvalue=empty)
            rows = [max(domain.num_rows(one.num_tokens, one.size) for one in packs) for packs in of_passes]
        if domain.num_in_step > 1:
            own += [empty] * (most - len(own))
        return [self._batch(pack, first, work, at_least) for pack, at_least in zip(own, rows, strict=False)]

    def _batch(self, pack: Pack, first: int, work: StepWork, num_rows: int) -> PackBatch:
        """Read the documents of a pack, and fill it up to `num_rows` on each rank at least: the rest is a document without loss."""
        domain, limit = self._settings.domain, self._settings.seq_length
        samples = [self._samples[first + document] for document in pack.documents]
        length = max(domain.num_rows(pack.num_tokens, pack.size), num_rows) * pack.size
        tokens, labels, positions, token_ids = (np.zeros((1, length), np.int64) for _ in range(4))
        loss_mask = np.zeros((1, length), np.float32)
        wholes: tuple[npt.NDArray[Any], ...] = (tokens, labels, loss_mask, positions)
        starts, end = [], 0
        for document, sample in zip(pack.documents, samples, strict=True):
            assert isinstance(sample, Sample), "packs are of a GPT's samples"
            rows = slice(end, end + len(sample.tokens))
            for whole, own in zip(wholes, sample.arrays.values(), strict=True):
                whole[0, rows] = own
            token_ids[0, rows] = (first + document) * limit + np.arange(len(sample.tokens))
            starts += (end + sample.document_starts).tolist()
            end = rows.stop
        _fill(positions, starts, end, limit)
        return PackBatch(
            tokens=self._tensor(tokens),
            labels=self._tensor(labels),
            loss_mask=self._tensor(loss_mask),
            position_ids=self._tensor(positions),
            documents=self._documents(starts, length),
            token_ids=self._tensor(token_ids),
            group_size=pack.size,
            num_tokens=end,
            work=work,
        )

    def _documents(self, starts: Sequence[int], length: int) -> Documents:
        boundaries = np.array([*starts, length], np.int32)
        return Documents(self._tensor(boundaries), int(np.diff(boundaries).max()), 1, length)

    def _tensor(self, values: Any) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor


def _fill(positions: Integers, starts: list[int], end: int, limit: int) -> None:
    """Make the rest of a pack documents of at most `limit` tokens."""
    length = positions.shape[1]
    for start in range(end, length, limit):
        starts.append(start)
        stop = min(start + limit, length)
        positions[0, start:stop] = np.arange(stop - start)
