"""Asynchronous copies of a few numbers from device to host."""

from __future__ import annotations

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

    def read(self) -> list[Any]:
        """Wait for the copy and return the numbers as (nested) lists."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[Any] = self._numbers.tolist()
        return numbers
