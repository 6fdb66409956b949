"""Read samples into the micro-batches of a step, and prefetch the next step while this one computes.

    microbatches(consumed, n) -> prefetched by background threads, or read now if the prefetch was for another step
                              -> copied to the device -> prefetch (consumed + this step's samples, n)

The result depends on the arguments alone; prefetching only changes when samples are read.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatrain.config.errors import MegatrainError
from megatrain.data.samples.dataset import FamilySample
from megatrain.data.samples.masked_dataset import array_shapes
from megatrain.data.samples.sampler import SingleSampler
from megatrain.parallel.batch import Batch
from megatrain.parallel.documents import Documents
from megatrain.parallel.family_batch import family_batch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from megatrain.data.samples.dataset import AnySample, SampleDataset, TokenSpan
    from megatrain.data.samples.sampler import Sampler


@dataclass(frozen=True)
class _Step:
    """A step's position in the data, which determines its batches."""

    consumed_samples: int
    num_microbatches: int


class _HostBatches:
    """The batches of a step in host memory: one tensor [samples, ...] per array, so that device copies are few and large."""

    def __init__(
        self,
        rows: int,
        shapes: Mapping[str, tuple[int, ...]],
        num_microbatches: int,
        *,
        family: str,
        is_pinned: bool,
    ) -> None:
        self._family = family
        self.arrays = {
            name: torch.empty(
                (rows, *shape),
                dtype=torch.float32 if name in ("loss_mask", "images") else torch.int64,
                pin_memory=is_pinned,
            )
            for name, shape in shapes.items()
        }
        self.documents: list[Documents | None] = [None] * num_microbatches

    def batches(self, device: torch.device) -> list[Batch]:
        """Copy the micro-batches to the device."""
        moved = [
            x.to(device, non_blocking=True).tensor_split(len(self.documents)) for x in self.arrays.values()
        ]
        return [
            self._batch(
                dict(zip(self.arrays, arrays, strict=True)),
                documents
                and replace(documents, cu_seqlens=documents.cu_seqlens.to(device, non_blocking=True)),
            )
            for *arrays, documents in zip(*moved, self.documents, strict=True)
        ]

    def _batch(self, arrays: dict[str, torch.Tensor], documents: Documents | None) -> Batch:
        """Return a micro-batch from its arrays, [b, ...] each."""
        if self._family != "gpt":
            return family_batch(self._family, arrays, documents)
        return Batch(
            tokens=arrays["tokens"],
            labels=arrays["labels"],
            loss_mask=arrays["loss_mask"],
            position_ids=arrays["position_ids"],
            documents=documents,
        )


def require_samples(first: int, stop: int, num_samples: int | None) -> None:
    """Raise MegatrainError if a step needs other samples than those from 0 on, below `num_samples` (None: there is no end)."""
    if num_samples is not None and stop > num_samples:
        raise MegatrainError(
            f"a step needs samples {first} to {stop - 1}, but the dataset has {num_samples}",
            fix="build the data for at least as many samples as the run reads "
            "(--train-iters, --train-samples, --eval-iters), or end the run earlier",
        )


class BatchLoader:
    """The micro-batches of one data-parallel rank, prefetched by background threads."""

    def __init__(
        self,
        samples: SampleDataset,
        sampler: Sampler,
        *,
        seq_length: int,
        device: torch.device | str = "cpu",
        num_workers: int = 1,
        has_documents: bool = False,
        family: str = "gpt",
        decoder_seq_length: int | None = None,
        image_shape: tuple[int, ...] | None = None,
    ) -> None:
        """Load the samples that a sampler selects.

        Args:
            samples: the dataset.
            sampler: the sample indices of this rank.
            seq_length: s, tokens of each sample; of T5 those of the encoder.
            device: device of the returned batches.
            num_workers: prefetching threads; 0: each step reads its samples when they are requested.
            has_documents: batches include document boundaries.
            family: the family of the model, see `family_batch`.
            decoder_seq_length: tokens of T5's decoder.
            image_shape: shape of the images of a sample, if it has some.
        """
        self._samples = samples
        self._sampler = sampler
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._family = family
        self._shapes = array_shapes(family, seq_length, decoder_seq_length, image_shape)
        self._has_documents = has_documents
        self._threads = (
            ThreadPoolExecutor(num_workers, "batches", initializer=set_device, initargs=(self._device,))
            if num_workers
            else None
        )
        self._prefetched: tuple[_Step, _HostBatches, list[Future[None]]] | None = None

    def microbatches(self, consumed_samples: int, num_microbatches: int) -> list[Batch]:
        """Return the rank's micro-batches, on the device, of the step that starts after `consumed_samples`.

        Raises:
            MegatrainError: the step needs samples after the last one.
        """
        step = _Step(consumed_samples, num_microbatches)
        require_samples(step.consumed_samples, self._end(step), self._sampler.end)
        # The calling thread copies, so that its stream orders the copy before the use. It copies before it submits the
        # next prefetch, whose threads would slow the copy down.
        batches = self._read(step).batches(self._device)
        following, end = _Step(self._end(step), num_microbatches), self._sampler.end
        if self._threads is not None and (end is None or self._end(following) <= end):
            self._prefetched = (following, *self._submit(self._threads, following))
        return batches

    def spans(self, sample: int) -> list[TokenSpan]:
        """Return the stored token spans of a sample of the run; empty if the sampler permutes samples."""
        is_in_order = isinstance(self._sampler, SingleSampler) and sample < len(self._samples)
        return self._samples.spans(sample) if is_in_order else []

    def close(self) -> None:
        """Stop the background threads and drop the prefetched step."""
        self._prefetched = None
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def _read(self, step: _Step) -> _HostBatches:
        """Return the prefetched step; if another step was prefetched, read this one after the work in progress."""
        if self._threads is None:
            host = self._allocate(step)
            for number in range(step.num_microbatches):
                self._fill(host, step, number)
            return host
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and prefetched[0] == step:
            _, host, futures = prefetched
        else:
            for future in prefetched[2] if prefetched is not None else ():
                future.cancel()
            host, futures = self._submit(self._threads, step)
        for future in futures:
            future.result()
        return host

    def _submit(self, threads: ThreadPoolExecutor, step: _Step) -> tuple[_HostBatches, list[Future[None]]]:
        host = self._allocate(step)
        return host, [
            threads.submit(self._fill, host, step, number) for number in range(step.num_microbatches)
        ]

    def _allocate(self, step: _Step) -> _HostBatches:
        rows = step.num_microbatches * self._sampler.shard.micro_batch_size
        is_pinned = self._device.type == "cuda"
        return _HostBatches(
            rows, self._shapes, step.num_microbatches, family=self._family, is_pinned=is_pinned
        )

    def _end(self, step: _Step) -> int:
        """Return the samples consumed after a step, over all ranks."""
        return step.consumed_samples + step.num_microbatches * self._sampler.shard.global_micro_batch_size

    def _fill(self, host: _HostBatches, step: _Step, number: int) -> None:
        """Read micro-batch `number` into its rows."""
        size = self._sampler.shard.micro_batch_size
        samples = [self._samples[k] for k in self._sampler.indices(step.consumed_samples, number)]
        # The last micro-batch of full validation is filled up with samples without loss.
        if len(samples) < size:
            padding = _without_loss(samples[0] if samples else self._samples[0])
            samples += [padding] * (size - len(samples))
        for row, sample in enumerate(samples, start=number * size):
            for name, values in sample.arrays.items():
                host.arrays[name].numpy()[row] = values
        if self._has_documents:
            documents = _documents(samples)
            if self._device.type == "cuda":
                documents = replace(documents, cu_seqlens=documents.cu_seqlens.pin_memory())
            host.documents[number] = documents


def _without_loss(sample: AnySample) -> AnySample:
    """Return a padding sample of the same shape whose loss mask is zero."""
    if isinstance(sample, FamilySample):
        return FamilySample({name: np.zeros_like(values) for name, values in sample.arrays.items()})
    return type(sample)(
        np.zeros_like(sample.tokens),
        np.zeros_like(sample.labels),
        np.zeros_like(sample.loss_mask),
        np.arange(len(sample.tokens)),
        np.zeros(1, np.int64),
    )


def _documents(samples: Sequence[AnySample]) -> Documents:
    """Return the document boundaries of a micro-batch whose samples are concatenated."""
    length = len(samples[0].arrays["tokens"])
    starts = [number * length + sample.document_starts for number, sample in enumerate(samples)]
    cu_seqlens = np.concatenate([*starts, [len(samples) * length]]).astype(np.int32)
    return Documents(torch.from_numpy(cu_seqlens), int(np.diff(cu_seqlens).max()), len(samples), length)


def set_device(device: torch.device) -> None:
    """Select the rank's GPU in a new thread, which would otherwise create a CUDA context on device 0 to pin memory."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
