"""The energy that a rank's GPU uses (--log-energy), from the counter of NVML: mJ since the driver was loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatrain.config.errors import InputError


class EnergyMeter:
    """Reads the energy counter of a GPU.

    Raises:
        InputError: the GPU or its driver has no such counter.
    """

    def __init__(self, device: torch.device) -> None:
        import pynvml  # noqa: PLC0415 (optional package)

        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(device).uuid
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._last = self._read()
        except pynvml.NVMLError as error:
            raise InputError(
                f"--log-energy: the energy of {device} cannot be read: {error}", fix="remove --log-energy"
            ) from error

    def take(self) -> float:
        """Return the joules since the last call."""
        now = self._read()
        joules, self._last = (now - self._last) / 1000, now
        return joules

    def _read(self) -> int:
        return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))


def energy_line(joules: Sequence[float], *, seconds: float, num_iterations: int) -> str:
    """Return the line of an interval.

    Args:
        joules: energy of each rank's GPU.
        seconds: time of the interval.
        num_iterations: its iterations.
    """
    mean = sum(joules) / len(joules)
    return (
        f" energy per GPU (J/iter/GPU): {mean / num_iterations:.2f} | power per GPU (W/GPU): {mean / seconds:.2f} |"
        f" total (J/iter): {sum(joules) / num_iterations:.1f} |"
    )
