"""The result of a step, and its copy to the host without a synchronisation of the device.

    step ─> StepMetrics on the device ─> PendingStep: one copy to the host in flight ─> read(): waits for it ─> StepReport

The next step may begin before `read`, so that the device always has work.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain.kernels.host_copy import HostCopy
from megatrain.training.losses import Losses
from megatrain.training.routers import RouterMetrics, RouterReport


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Metrics of a step as tensors: on the device as the step computes them, on the host (fp64) after one copy of all."""

    losses: Losses
    grad_norm: Tensor
    """Norm of the gradients before clipping, without the loss scale, []."""
    is_updated: Tensor
    """The step updated weights, bool []."""
    num_zeros: Tensor | None = None
    params_norm: Tensor | None = None
    max_attention_logit: Tensor | None = None
    routers: RouterMetrics | None = None
    flags: Tensor | None = None
    """Maximum over all ranks of each flag that was passed to the step, [flags]."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Metrics of a step on the host, equal on all ranks."""

    lm_loss: float
    """Mean of the token losses that the loss mask keeps, over the global batch."""
    sop_loss: float | None = None
    """Mean loss of the next-sentence head over the micro-batches; None without one."""
    z_loss: float | None = None
    """Mean of the z-loss over the same tokens; None without --z-loss-coeff."""
    indexer_loss: float | None = None
    """Mean loss of the indexers of sparse attention over layers and micro-batches; None without any."""
    distillation_losses: tuple[float, ...] = ()
    """The mean divergence from a teacher's logits, then the mean distance of each layer pair, over the same tokens."""
    mtp_losses: tuple[float, ...] = ()
    """The mean for each depth of multi-token prediction, over the tokens that count there."""
    grad_norm: float
    """Norm of the gradients before clipping, without the loss scale."""
    loss_scale: float
    """Factor on the loss in this step."""
    is_finite: bool
    """False: loss or gradient norm are infinite or NaN."""
    is_updated: bool
    """False: the step updated nothing."""
    params_norm: float | None = None
    """L2 norm of the updated weights, with --log-params-norm."""
    max_attention_logit: float | None = None
    """Largest attention logit of the step's passes, with --qk-clip or --log-max-attention-logit."""
    num_zeros: int | None = None
    """Number of gradient elements that are zero, with --log-num-zeros-in-grad."""
    routers: RouterReport | None = None
    """None for a model without experts."""
    flags: tuple[int, ...] = ()
    """Maximum over all ranks of each flag that was passed to the step."""

    @classmethod
    def of(cls, metrics: StepMetrics, *, loss_scale: float, routers: RouterReport | None) -> StepReport:
        """Return the report of metrics on the host."""
        losses, lm_loss, grad_norm = metrics.losses, metrics.losses.lm_loss.item(), metrics.grad_norm.item()
        return cls(
            lm_loss=lm_loss,
            sop_loss=None if losses.sop_loss is None else losses.sop_loss.item(),
            z_loss=None if losses.z_loss is None else losses.z_loss.item(),
            indexer_loss=None if losses.indexer_loss is None else losses.indexer_loss.item(),
            grad_norm=grad_norm,
            loss_scale=loss_scale,
            is_finite=math.isfinite(grad_norm) and math.isfinite(lm_loss),
            is_updated=bool(metrics.is_updated),
            distillation_losses=() if losses.distillation is None else tuple(losses.distillation.tolist()),
            mtp_losses=() if losses.mtp is None else tuple(losses.mtp.tolist()),
            params_norm=None if metrics.params_norm is None else metrics.params_norm.item(),
            max_attention_logit=None
            if metrics.max_attention_logit is None
            else metrics.max_attention_logit.item(),
            num_zeros=None if metrics.num_zeros is None else int(metrics.num_zeros),
            routers=routers,
            flags=() if metrics.flags is None else tuple(map(int, metrics.flags)),
        )


class DeviceTime:
    """A point in a device's work: now on a CPU, after all work enqueued so far on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._host_seconds = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def wait(self) -> None:
        """Block the host until the device has reached this point."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: DeviceTime) -> float:
        """Return the seconds between two points of one device; it must have reached both."""
        if self._event is None or earlier._event is None:
            return self._host_seconds - earlier._host_seconds
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1000


class PendingStep:
    """A step that all ranks have begun and whose report is not read yet. Call `read` once, in the order of the steps.

    Args:
        metrics: of the step, on the device.
        report: makes the report from the metrics on the host.
    """

    def __init__(self, metrics: StepMetrics, report: Callable[[StepMetrics], StepReport]) -> None:
        self._metrics, self._report = metrics, report
        values = torch.cat([tensor.double().flatten() for tensor in _tensors(metrics)])
        self._copy = HostCopy(values)
        self.end = DeviceTime(values.device)
        """End of all that the step makes the device do."""

    def read(self) -> StepReport:
        """Wait for the end of the step and return its report."""
        self.end.wait()
        values = torch.tensor(self._copy.read(), dtype=torch.float64)
        sizes = [tensor.numel() for tensor in _tensors(self._metrics)]
        return self._report(_with_tensors(self._metrics, iter(values.split(sizes))))


def _tensors(metrics: Any) -> Iterator[Tensor]:
    """Yield the tensors of a dataclass and of the dataclasses in it, in the order of the fields."""
    for field in dataclasses.fields(metrics):
        value = getattr(metrics, field.name)
        if isinstance(value, Tensor):
            yield value
        elif value is not None:
            yield from _tensors(value)


def _with_tensors(metrics: Any, values: Iterator[Tensor]) -> Any:
    """Return the dataclass with other values in place of `_tensors`, in the same order and shapes."""
    changed = {}
    for field in dataclasses.fields(metrics):
        value = getattr(metrics, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = next(values).view(value.shape)
        elif value is not None:
            changed[field.name] = _with_tensors(value, values)
    return dataclasses.replace(metrics, **changed)
