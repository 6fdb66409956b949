"""Asynchronous copies between device and host: of a few numbers, and the host memory of larger ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """Numbers that are copied to the host after the device's current work, without waiting; on a CPU no copy is made."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._numbers = numbers
        if numbers.device.type == "cuda":
            pinned = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._numbers = pinned.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """Wait for the copy and return the numbers, on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers

    def read(self) -> list[Any]:
        """Wait for the copy and return the numbers as (nested) lists."""
        numbers: list[Any] = self.wait().tolist()
        return numbers


def copy_to_device(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (nested) numbers as a tensor on the device; the host does not wait for the device's current work."""
    found = torch.tensor(numbers, dtype=dtype)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


def zeros_on_host(numel: int, dtype: torch.dtype, device: torch.device, *, is_pinned: bool = False) -> Tensor:
    """Return zeros in host memory for a rank that computes on `device`; a meta tensor for the meta device.

    Args:
        is_pinned: pin the memory, if `device` is a GPU, for copies that are concurrent with computation.
    """
    return torch.zeros(
        numel,
        dtype=dtype,
        device="meta" if device.type == "meta" else "cpu",
        pin_memory=is_pinned and device.type == "cuda",
    )


class HostBuffers:
    """Buffers of bytes in host memory, pinned if the device is a GPU, that are used again."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_pinned = device, torch.empty(0, device=device).is_cuda
        self._free: list[tuple[Tensor, torch.cuda.Event | None]] = []
        self.num_bytes = 0
        """Bytes of all buffers."""

    def take(self, num_bytes: int, stream: torch.cuda.Stream | None) -> Tensor:
        """Return a buffer of at least this size, uint8 [n], which work of the stream may overwrite."""
        fitting = [one for one in self._free if num_bytes <= one[0].numel() <= 2 * num_bytes]
        if not fitting:
            size = 1 << (num_bytes - 1).bit_length() if self._is_pinned else num_bytes  # as torch pins memory
            self.num_bytes += size
            return zeros_on_host(size, torch.uint8, self._device, is_pinned=True)
        memory, last_read = chosen = min(fitting, key=lambda one: one[0].numel())
        self._free = [one for one in self._free if one is not chosen]
        if last_read is not None and stream is not None:
            stream.wait_event(last_read)
        return memory

    def give_back(self, memory: Tensor, last_read: torch.cuda.Event | None) -> None:
        """Let a buffer be used again, once this event is complete."""
        self._free.append((memory, last_read))
