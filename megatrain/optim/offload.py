"""Optimizer state in host memory: the CPU updates the shards of the last buckets.

    GPU              update 0 | update 1
    device to host   gradients 2 | gradients 3 | gradients 4 ...
    CPU                          | update 2    | update 3    | update 4
    host to device                             | weights 2   | weights 3   | weights 4

Copies use pinned staging buffers for two buckets: one bucket is copied while another is updated. On a CPU the same
steps run one after the other.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.kernels.host_copy import zeros_on_host
from megatrain.kernels.optimizer.shard_update import FlatUpdate

_NUM_SLOTS = 2


def num_offloaded(sizes: Sequence[int], fraction: float) -> int:
    """Return the number of buckets to offload: the fewest from the end that have this fraction of all elements."""
    required = fraction * sum(sizes)
    held = itertools.accumulate(reversed(sizes), initial=0)
    return next(count for count, elements in enumerate(held) if elements >= required)


@dataclass
class _Slot:
    """Staging buffers for one bucket's shard."""

    grad: Tensor
    weight: Tensor
    grad_copied: torch.cuda.Event | None = None
    """Recorded after the copy of the gradients to `grad`."""
    weight_copied: torch.cuda.Event | None = None
    """Recorded after the copy of the weights from `weight`."""


class HostUpdates:
    """Copies gradients of offloaded shards to the host, and their new weights back.

    Args:
        gradients, weights: of the offloaded shards, on the device.
        master_dtype: dtype of master weights.
    """

    def __init__(
        self, gradients: Sequence[Tensor], weights: Sequence[Tensor], master_dtype: torch.dtype
    ) -> None:
        self._device = weights[0].device
        largest = max(weight.numel() for weight in weights)
        num_slots = min(_NUM_SLOTS, len(weights))
        self._slots = [
            _Slot(
                zeros_on_host(largest, gradients[0].dtype, self._device, is_pinned=True),
                zeros_on_host(largest, weights[0].dtype, self._device, is_pinned=True),
            )
            for _ in range(num_slots)
        ]
        self._scale = zeros_on_host(1, master_dtype, self._device, is_pinned=True)[0]
        self._is_finite = zeros_on_host(1, torch.bool, self._device, is_pinned=True)[0]
        self._updates: Sequence[FlatUpdate] = ()
        has_streams = self._device.type == "cuda"
        self._to_host = torch.cuda.Stream(self._device) if has_streams else None
        self._to_device = torch.cuda.Stream(self._device) if has_streams else None

    @property
    def staging_buffers(self) -> list[Tensor]:
        """Staging buffers for gradients and weights, in host memory."""
        return [tensor for slot in self._slots for tensor in (slot.grad, slot.weight)]

    def begin(self, updates: Sequence[FlatUpdate]) -> None:
        """Begin the copies to the host, once gradients are final.

        Args:
            updates: of the offloaded shards, with master weights on the host and all else on the device.
        """
        self._updates = updates
        for stream in (self._to_host, self._to_device):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._to_host):
            self._scale.copy_(updates[0].grad_scale, non_blocking=True)
            self._is_finite.copy_(updates[0].is_finite, non_blocking=True)
        self._fetch(0)

    def wait(self, number: int) -> FlatUpdate:
        """Wait for a shard's gradients, begin the next shard's copy, and return the update with all tensors on the host."""
        if number + 1 < len(self._updates) and len(self._slots) > 1:
            self._fetch(number + 1)
        update, slot = self._updates[number], self._slot(number)
        for event in (slot.grad_copied, slot.weight_copied):
            if event is not None:
                event.synchronize()
        size = update.master.numel()
        return dataclasses.replace(
            update,
            grad=slot.grad[:size],
            weight=slot.weight[:size],
            grad_scale=self._scale,
            is_finite=self._is_finite,
        )

    def send_weights(self, number: int) -> None:
        """Copy a shard's new weights to the device; its current stream waits for them."""
        update, slot = self._updates[number], self._slot(number)
        if update.master.is_meta or not self._is_finite:
            return  # nothing was updated
        with torch.cuda.stream(self._to_device):
            update.weight.copy_(slot.weight[: update.weight.numel()], non_blocking=True)
        if self._to_device is not None:
            slot.weight_copied = self._to_device.record_event()
            torch.cuda.current_stream(self._device).wait_event(slot.weight_copied)

    def _slot(self, number: int) -> _Slot:
        return self._slots[number % len(self._slots)]

    def _fetch(self, number: int) -> None:
        """Begin the copy of a shard's gradients; its slot is free, since the shard that used it is updated."""
        slot, grad = self._slot(number), self._updates[number].grad
        with torch.cuda.stream(self._to_host):
            slot.grad[: grad.numel()].copy_(grad, non_blocking=True)
        if self._to_host is not None:
            slot.grad_copied = self._to_host.record_event()
