"""Turns samples into the micro-batches of a step, the next step's while this one computes.

    microbatches(consumed, n) -> read by the background thread since the last call, if that foresaw it, else now
                              -> copied to the device -> (consumed + what this step takes, n) is read ahead

What comes back depends on the arguments alone: reading ahead only changes when it is read.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
import torch

from megatrain.config.errors import MegatrainError
from megatrain.data.sampler import single
from megatrain.parallel.batch import Batch

if TYPE_CHECKING:
    from types import TracebackType

    from megatrain.data.gpt import Sample


class Samples(Protocol):
    """What a loader reads: numbered samples."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, k: int, /) -> Sample:
        """Sample k."""


@dataclass(frozen=True)
class _Step:
    """A step's place in the data: all that its batches depend on."""

    consumed_samples: int
    num_microbatches: int


class BatchLoader:
    """The micro-batches of one data-parallel rank, in the order of `sampler.single`."""

    def __init__(
        self,
        samples: Samples,
        *,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._samples = samples
        self._micro_batch_size = micro_batch_size
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._thread = ThreadPoolExecutor(1, "batches", initializer=_enter_device, initargs=(self._device,))
        self._ahead: tuple[_Step, Future[list[Batch]]] | None = None

    def __enter__(self) -> Self:
        """Leaving the `with` block ends the thread."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the background thread."""
        self.close()

    def microbatches(self, consumed_samples: int, num_microbatches: int) -> list[Batch]:
        """The rank's micro-batches of the step that starts behind `consumed_samples`, on the device.

        Raises:
            MegatrainError: the step needs samples beyond the last one.
        """
        step = _Step(consumed_samples, num_microbatches)
        self._require_samples(step)
        batches = self._take_or_submit(step).result()
        following = _Step(self._end(step), num_microbatches)
        if self._end(following) <= len(self._samples):
            self._ahead = (following, self._thread.submit(self._read, following))
        return [self._to_device(batch) for batch in batches]

    def close(self) -> None:
        """End the background thread; what it read ahead is dropped."""
        self._ahead = None
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _take_or_submit(self, step: _Step) -> Future[list[Batch]]:
        """The step as read ahead if it was foreseen; else it is read now, behind what the thread is at."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if ahead[0] == step:
                return ahead[1]
            ahead[1].cancel()
        return self._thread.submit(self._read, step)

    def _end(self, step: _Step) -> int:
        """Consumed samples after a step, over all ranks."""
        return step.consumed_samples + step.num_microbatches * self._micro_batch_size * self._dp_size

    def _require_samples(self, step: _Step) -> None:
        if self._end(step) > len(self._samples):
            raise MegatrainError(
                f"a step needs samples {step.consumed_samples} to {self._end(step) - 1}, "
                f"but the dataset has {len(self._samples)}",
                fix="build the data for as many samples as the run takes "
                "(--train-iters, --train-samples, --eval-iters), or end the run earlier",
            )

    def _read(self, step: _Step) -> list[Batch]:
        return [
            self._collate(
                single(
                    step.consumed_samples,
                    number,
                    micro_batch_size=self._micro_batch_size,
                    dp_rank=self._dp_rank,
                    dp_size=self._dp_size,
                    total_samples=len(self._samples),
                )
            )
            for number in range(step.num_microbatches)
        ]

    def _collate(self, numbers: range) -> Batch:
        samples = [self._samples[number] for number in numbers]
        batch = Batch(
            tokens=torch.from_numpy(np.stack([sample.tokens for sample in samples])),
            labels=torch.from_numpy(np.stack([sample.labels for sample in samples])),
            loss_mask=torch.from_numpy(np.stack([sample.loss_mask for sample in samples])),
            position_ids=torch.from_numpy(np.stack([sample.position_ids for sample in samples])),
        )
        if self._device.type != "cuda":
            return batch
        return Batch(
            tokens=batch.tokens.pin_memory(),
            labels=batch.labels.pin_memory(),
            loss_mask=batch.loss_mask.pin_memory(),
            position_ids=batch.position_ids.pin_memory(),
        )

    def _to_device(self, batch: Batch) -> Batch:
        """Copied by the caller, so that the copy is ordered before its use on the caller's stream."""
        return Batch(
            tokens=batch.tokens.to(self._device, non_blocking=True),
            labels=batch.labels.to(self._device, non_blocking=True),
            loss_mask=batch.loss_mask.to(self._device, non_blocking=True),
            position_ids=batch.position_ids.to(self._device, non_blocking=True),
        )


def _enter_device(device: torch.device) -> None:
    """Pin memory for the rank's own GPU: a new thread stands on the first, and would open a context there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
