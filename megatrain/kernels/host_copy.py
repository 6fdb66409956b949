"""Asynchronous copies of a few numbers between device and host."""

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
