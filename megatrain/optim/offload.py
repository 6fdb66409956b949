"""Optimizer state in the host's memory: the last buckets' shards are updated by the CPU.

    GPU     update 0 | update 1
    down    gradients 2 | gradients 3 | gradients 4 ...
    CPU                 | update 2    | update 3    | update 4
    up                                | weights 2   | weights 3   | weights 4

Copies go through pinned memory for two buckets, so that one bucket travels while another is worked on. On a CPU the
same steps are taken, one after the other.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.kernels.optimizer.shard_update import FlatUpdate

_NUM_PLACES = 2


def zeros_on_host(numel: int, dtype: torch.dtype, device: torch.device, *, is_pinned: bool = False) -> Tensor:
    """Memory of the host, of a rank that computes on `device`; without memory where that has none.

    Args:
        is_pinned: whether a GPU reads and writes it beside all else.
    """
    return torch.zeros(
        numel,
        dtype=dtype,
        device="meta" if device.type == "meta" else "cpu",
        pin_memory=is_pinned and device.type == "cuda",
    )


def num_offloaded(sizes: Sequence[int], fraction: float) -> int:
    """How many of the buckets go to the host: the fewest from the end that hold this fraction of all elements."""
    wanted = fraction * sum(sizes)
    held = itertools.accumulate(reversed(sizes), initial=0)
    return next(count for count, elements in enumerate(held) if elements >= wanted)


@dataclass
class _Place:
    """Room for one bucket's shard on its way."""

    grad: Tensor
    weight: Tensor
    has_come: torch.cuda.Event | None = None
    has_gone: torch.cuda.Event | None = None
    """Whether the weights that were last written here are on the GPU."""


class HostUpdates:
    """Brings gradients of shards down to the host, and their new weights up.

    Args:
        gradients, weights: of these shards, on the device.
        master_dtype: of master weights.
    """

    def __init__(
        self, gradients: Sequence[Tensor], weights: Sequence[Tensor], master_dtype: torch.dtype
    ) -> None:
        self._device = weights[0].device
        most = max(weight.numel() for weight in weights)
        num_places = min(_NUM_PLACES, len(weights))
        self._places = [
            _Place(
                zeros_on_host(most, gradients[0].dtype, self._device, is_pinned=True),
                zeros_on_host(most, weights[0].dtype, self._device, is_pinned=True),
            )
            for _ in range(num_places)
        ]
        self._scale = zeros_on_host(1, master_dtype, self._device, is_pinned=True)[0]
        self._is_finite = zeros_on_host(1, torch.bool, self._device, is_pinned=True)[0]
        self._updates: Sequence[FlatUpdate] = ()
        has_streams = self._device.type == "cuda"
        self._down = torch.cuda.Stream(self._device) if has_streams else None
        self._up = torch.cuda.Stream(self._device) if has_streams else None

    @property
    def travelling(self) -> list[Tensor]:
        """Room for what travels, in the host's memory."""
        return [tensor for place in self._places for tensor in (place.grad, place.weight)]

    def begin(self, updates: Sequence[FlatUpdate]) -> None:
        """Gradients are final: the first of them begin to come.

        Args:
            updates: of these shards, with their master weights on the host and all else on the device.
        """
        self._updates = updates
        for stream in (self._down, self._up):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            self._scale.copy_(updates[0].grad_scale, non_blocking=True)
            self._is_finite.copy_(updates[0].is_finite, non_blocking=True)
        self._fetch(0)

    def arrived(self, number: int) -> FlatUpdate:
        """The update of a shard with all tensors on the host, which waits for them; the next shard's begin to come."""
        if number + 1 < len(self._updates) and len(self._places) > 1:
            self._fetch(number + 1)
        update, place = self._updates[number], self._place(number)
        for event in (place.has_come, place.has_gone):
            if event is not None:
                event.synchronize()
        size = update.master.numel()
        return dataclasses.replace(
            update,
            grad=place.grad[:size],
            weight=place.weight[:size],
            grad_scale=self._scale,
            is_finite=self._is_finite,
        )

    def send(self, number: int) -> None:
        """What is computed next on the device sees the new weights of a shard that `arrived` and was updated."""
        update, place = self._updates[number], self._place(number)
        if update.master.is_meta or not self._is_finite:
            return  # nothing was updated
        with torch.cuda.stream(self._up):
            update.weight.copy_(place.weight[: update.weight.numel()], non_blocking=True)
        if self._up is not None:
            place.has_gone = self._up.record_event()
            torch.cuda.current_stream(self._device).wait_event(place.has_gone)

    def _place(self, number: int) -> _Place:
        return self._places[number % len(self._places)]

    def _fetch(self, number: int) -> None:
        """Its place is free: the shard that was there before has been worked on."""
        place, grad = self._place(number), self._updates[number].grad
        with torch.cuda.stream(self._down):
            place.grad[: grad.numel()].copy_(grad, non_blocking=True)
        if self._down is not None:
            place.has_come = self._down.record_event()
