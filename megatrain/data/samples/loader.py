"""Turns samples into the micro-batches of a step, the next step's while this one computes.

    microbatches(consumed, n) -> read by background threads since the last call, if that foresaw it, else now
                              -> copied to the device -> (consumed + what this step takes, n) is read ahead

What comes back depends on the arguments alone: reading ahead only changes when it is read.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from megatrain.config.errors import MegatrainError
from megatrain.parallel.batch import Batch, Documents

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from megatrain.data.samples.dataset import Sample, Samples
    from megatrain.data.samples.sampler import Order


@dataclass(frozen=True)
class _Step:
    """A step's place in the data: all that its batches depend on."""

    consumed_samples: int
    num_microbatches: int


class _Block:
    """The batches of a step in host memory, all samples in one tensor of each kind: few copies, and large ones."""

    def __init__(self, rows: int, seq_length: int, num_microbatches: int, *, is_pinned: bool) -> None:
        def empty(dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(rows, seq_length, dtype=dtype, pin_memory=is_pinned)

        self.tokens, self.labels, self.position_ids = (empty(torch.int64) for _ in range(3))
        self.loss_mask = empty(torch.float32)
        self.documents: list[Documents | None] = [None] * num_microbatches

    def put(self, row: int, sample: Sample) -> None:
        """Write a sample into its row."""
        self.tokens.numpy()[row] = sample.tokens
        self.labels.numpy()[row] = sample.labels
        self.position_ids.numpy()[row] = sample.position_ids
        self.loss_mask.numpy()[row] = sample.loss_mask

    def batches(self, device: torch.device) -> list[Batch]:
        """The micro-batches on the device."""
        moved = [
            x.to(device, non_blocking=True).tensor_split(len(self.documents))
            for x in (self.tokens, self.labels, self.loss_mask, self.position_ids)
        ]
        return [
            Batch(
                tokens=tokens,
                labels=labels,
                loss_mask=loss_mask,
                position_ids=position_ids,
                documents=documents
                and replace(documents, cu_seqlens=documents.cu_seqlens.to(device, non_blocking=True)),
            )
            for tokens, labels, loss_mask, position_ids, documents in zip(*moved, self.documents, strict=True)
        ]


class BatchLoader:
    """The micro-batches of one data-parallel rank."""

    def __init__(
        self,
        samples: Samples,
        order: Order,
        *,
        seq_length: int,
        device: torch.device | str = "cpu",
        num_workers: int = 1,
        has_documents: bool = False,
    ) -> None:
        """Read samples in an order.

        Args:
            samples: what is read.
            order: which of them this rank reads, and when.
            seq_length: s, tokens of each sample.
            device: where batches are wanted.
            num_workers: threads that read ahead; 0: a step reads what it needs when it needs it.
            has_documents: whether batches say where documents start.
        """
        self._samples = samples
        self._order = order
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._seq_length = seq_length
        self._has_documents = has_documents
        self._threads = (
            ThreadPoolExecutor(num_workers, "batches", initializer=_enter_device, initargs=(self._device,))
            if num_workers
            else None
        )
        self._ahead: tuple[_Step, _Block, list[Future[None]]] | None = None

    def __enter__(self) -> Self:
        """Leaving the `with` block ends the threads."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the background threads."""
        self.close()

    def microbatches(self, consumed_samples: int, num_microbatches: int) -> list[Batch]:
        """The rank's micro-batches of the step that starts behind `consumed_samples`, on the device.

        Raises:
            MegatrainError: the step needs samples beyond the last one.
        """
        step = _Step(consumed_samples, num_microbatches)
        self._require_samples(step)
        # Copied by the caller, so that the copy is ordered before its use on the caller's stream, and before the
        # threads set to work again, which would hold it up.
        batches = self._read(step).batches(self._device)
        following = _Step(self._end(step), num_microbatches)
        if self._threads is not None and self._has(following):
            self._ahead = (following, *self._submit(self._threads, following))
        return batches

    def close(self) -> None:
        """End the background threads; what they read ahead is dropped."""
        self._ahead = None
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def _read(self, step: _Step) -> _Block:
        """The step as read ahead if it was foreseen; else it is read now, behind what the threads are at."""
        if self._threads is None:
            block = self._block(step)
            for number in range(step.num_microbatches):
                self._fill(block, step, number)
            return block
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == step:
            _, block, futures = ahead
        else:
            for future in ahead[2] if ahead is not None else ():
                future.cancel()
            block, futures = self._submit(self._threads, step)
        for future in futures:
            future.result()
        return block

    def _submit(self, threads: ThreadPoolExecutor, step: _Step) -> tuple[_Block, list[Future[None]]]:
        block = self._block(step)
        return block, [
            threads.submit(self._fill, block, step, number) for number in range(step.num_microbatches)
        ]

    def _block(self, step: _Step) -> _Block:
        rows = step.num_microbatches * self._order.share.micro_batch_size
        is_pinned = self._device.type == "cuda"
        return _Block(rows, self._seq_length, step.num_microbatches, is_pinned=is_pinned)

    def _end(self, step: _Step) -> int:
        """Consumed samples after a step, over all ranks."""
        return step.consumed_samples + step.num_microbatches * self._order.share.pass_size

    def _has(self, step: _Step) -> bool:
        return self._order.end is None or self._end(step) <= self._order.end

    def _require_samples(self, step: _Step) -> None:
        if not self._has(step):
            raise MegatrainError(
                f"a step needs samples {step.consumed_samples} to {self._end(step) - 1}, "
                f"but the dataset has {self._order.end}",
                fix="build the data for as many samples as the run takes "
                "(--train-iters, --train-samples, --eval-iters), or end the run earlier",
            )

    def _fill(self, block: _Block, step: _Step, number: int) -> None:
        """Read a micro-batch into its rows."""
        size = self._order.share.micro_batch_size
        samples = [self._samples[k] for k in self._order.numbers(step.consumed_samples, number)]
        if len(samples) < size:  # the last of a dataset that is read whole: shapes stay, their loss is masked
            blank = _blank(samples[0] if samples else self._samples[0])
            samples += [blank] * (size - len(samples))
        for row, sample in enumerate(samples, start=number * size):
            block.put(row, sample)
        if self._has_documents:
            documents = _documents(samples)
            if self._device.type == "cuda":
                documents = replace(documents, cu_seqlens=documents.cu_seqlens.pin_memory())
            block.documents[number] = documents


def _blank(sample: Sample) -> Sample:
    """A sample without loss."""
    return type(sample)(
        np.zeros_like(sample.tokens),
        np.zeros_like(sample.labels),
        np.zeros_like(sample.loss_mask),
        np.arange(len(sample.tokens)),
        np.zeros(1, np.int64),
    )


def _documents(samples: Sequence[Sample]) -> Documents:
    """The documents of a micro-batch, its samples laid end to end."""
    length = len(samples[0].tokens)
    starts = [number * length + sample.document_starts for number, sample in enumerate(samples)]
    borders = np.concatenate([*starts, [len(samples) * length]]).astype(np.int32)
    return Documents(torch.from_numpy(borders), int(np.diff(borders).max()), len(samples), length)


def _enter_device(device: torch.device) -> None:
    """Pin memory for the rank's own GPU: a new thread stands on the first, and would open a context there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
