"""Turns samples into the micro-batches of a step, the next step's while this one computes.

    microbatches(consumed, n) -> read by background threads since the last call, if that foresaw it, else now
                              -> copied to the device -> (consumed + what this step takes, n) is read ahead

What comes back depends on the arguments alone: reading ahead only changes when it is read.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch

from megatrain.config.errors import MegatrainError
from megatrain.parallel.batch import Batch, Documents

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from megatrain.data.sampler import Order
    from megatrain.data.samples import Sample, Samples


@dataclass(frozen=True)
class _Step:
    """A step's place in the data: all that its batches depend on."""

    consumed_samples: int
    num_microbatches: int


class BatchLoader:
    """The micro-batches of one data-parallel rank."""

    def __init__(
        self,
        samples: Samples,
        order: Order,
        *,
        device: torch.device | str = "cpu",
        num_workers: int = 1,
        has_documents: bool = False,
    ) -> None:
        """Read samples in an order.

        Args:
            samples: what is read.
            order: which of them this rank reads, and when.
            device: where batches are wanted.
            num_workers: threads that read ahead; 0: a step reads what it needs when it needs it.
            has_documents: whether batches say where documents start.
        """
        self._samples = samples
        self._order = order
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._has_documents = has_documents
        self._threads = (
            ThreadPoolExecutor(num_workers, "batches", initializer=_enter_device, initargs=(self._device,))
            if num_workers
            else None
        )
        self._ahead: tuple[_Step, list[Future[Batch]]] | None = None

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
        batches = self._read(step)
        following = _Step(self._end(step), num_microbatches)
        if self._threads is not None and self._has(following):
            self._ahead = (following, self._submit(self._threads, following))
        return [_moved(batch, self._device) for batch in batches]

    def close(self) -> None:
        """End the background threads; what they read ahead is dropped."""
        self._ahead = None
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def _read(self, step: _Step) -> list[Batch]:
        """The step as read ahead if it was foreseen; else it is read now, behind what the threads are at."""
        if self._threads is None:
            return [self._microbatch(step, number) for number in range(step.num_microbatches)]
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == step:
            futures = ahead[1]
        else:
            for future in ahead[1] if ahead is not None else ():
                future.cancel()
            futures = self._submit(self._threads, step)
        return [future.result() for future in futures]

    def _submit(self, threads: ThreadPoolExecutor, step: _Step) -> list[Future[Batch]]:
        return [threads.submit(self._microbatch, step, number) for number in range(step.num_microbatches)]

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

    def _microbatch(self, step: _Step, number: int) -> Batch:
        numbers = self._order.numbers(step.consumed_samples, number)
        samples = [self._samples[k] for k in numbers]
        missing = self._order.share.micro_batch_size - len(samples)
        if (
            missing
        ):  # the last micro-batches of a dataset that is read whole: their shape stays, their loss is masked
            blank = _blank(samples[0] if samples else self._samples[0])
            samples += [blank] * missing
        batch = Batch(
            tokens=_stacked([sample.tokens for sample in samples]),
            labels=_stacked([sample.labels for sample in samples]),
            loss_mask=_stacked([sample.loss_mask for sample in samples]),
            position_ids=_stacked([sample.position_ids for sample in samples]),
            documents=_documents(samples) if self._has_documents else None,
        )
        return _pinned(batch) if self._device.type == "cuda" else batch


def _stacked(arrays: Sequence[npt.NDArray[Any]]) -> torch.Tensor:
    return torch.from_numpy(np.stack(arrays))


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
    return Documents(torch.from_numpy(borders), int(np.diff(borders).max()), len(samples))


def _moved(batch: Batch, device: torch.device) -> Batch:
    """Copied by the caller, so that the copy is ordered before its use on the caller's stream."""
    return batch.map(lambda x: x.to(device, non_blocking=True))


def _pinned(batch: Batch) -> Batch:
    return batch.map(torch.Tensor.pin_memory)


def _enter_device(device: torch.device) -> None:
    """Pin memory for the rank's own GPU: a new thread stands on the first, and would open a context there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
