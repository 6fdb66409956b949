"""What a step did, and how the host hears of it without holding up the device.

    step ─> StepUnderway, its numbers on their way to the host ─> read(): waits for them ─> StepReport

Another step may begin in between, so that the device always has work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.kernels.host_copy import HostCopy
from megatrain.training.routers import RouterReport


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a step did, equal on all ranks."""

    lm_loss: float
    """Sum of the token losses that count over their number, of the whole global batch."""
    z_loss: float | None = None
    """The same of what --z-loss-coeff adds to them, where it is given."""
    grad_norm: float
    """Before clipping, without the loss scale."""
    loss_scale: float
    """What the loss was multiplied with."""
    is_finite: bool
    """False: nothing was updated."""
    params_norm: float | None = None
    """L2 norm of the updated weights, with --log-params-norm."""
    num_zeros: int | None = None
    """Elements of the gradient that are zero, with --log-num-zeros-in-grad."""
    routers: RouterReport | None = None
    """What the routers of layers with experts did, where there are any."""
    flags: tuple[int, ...] = ()
    """The largest of each number that ranks gave to the step."""


class DeviceTime:
    """When a device comes to this place in its work: a CPU now, a GPU once it has done what it was given before."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._host_seconds = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def wait(self) -> None:
        """Until the device has come there."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: DeviceTime) -> float:
        """Between two of one device, to both of which it has come."""
        if self._event is None or earlier._event is None:
            return self._host_seconds - earlier._host_seconds
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1000


class Told:
    """Named numbers that leave the device behind what it has to do until now.

    Args:
        values: numbers on one device, as tensors of one element.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._names = tuple(values)
        numbers = torch.stack([value.double() for value in values.values()])
        self._numbers = HostCopy(numbers)
        self.arrival = DeviceTime(numbers.device)

    def read(self) -> dict[str, float]:
        """The numbers; the host waits until they are there."""
        self.arrival.wait()  # which is told the time of, too
        return dict(zip(self._names, self._numbers.read(), strict=True))


@dataclass(frozen=True)
class StepUnderway:
    """A step that all ranks have begun. `read` is called once, in the order of the steps."""

    told: Told
    conclude: Callable[[Mapping[str, float]], StepReport]
    """Makes a report of the numbers; of the engine that began the step."""

    @property
    def end(self) -> DeviceTime:
        """Of all that the step had the device do."""
        return self.told.arrival

    def read(self) -> StepReport:
        """Wait for the step's end, and tell what it did."""
        return self.conclude(self.told.read())
