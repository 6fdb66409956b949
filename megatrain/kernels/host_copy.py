"""Numbers that the host needs of a device, fetched while the device goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """Numbers that leave the device behind what it has to do until now; from a CPU they need not."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._numbers = numbers
        if numbers.device.type == "cuda":
            pinned = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._numbers = pinned.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[Any]:
        """Lists of them; the host waits until they are there."""
        if self._event is not None:
            self._event.synchronize()
        found: list[Any] = self._numbers.tolist()
        return found
