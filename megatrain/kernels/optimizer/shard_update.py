"""Arguments of an update rule: the flat tensors of one shard, and the ranges in it that share hyperparameters."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class HyperparamRange:
    """Contiguous elements `start` to `stop` of a shard with the same hyperparameters."""

    start: int
    stop: int
    lr: float
    weight_decay: float
    eps_scale: float = 1.0
    """Factor on Adam's eps."""

    @property
    def part(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True, kw_only=True)
class FlatUpdate:
    """One step of one shard, without the rule's own state.

    Attributes:
        master: master weights, updated in place.
        grad: gradients, in the same dtype or a lower precision.
        weight: gets the new master weights in its own dtype; may be `master` itself.
        ranges: cover the shard, in order.
        grad_scale: factor on gradients, [] on their device, in the dtype of `master`.
        is_finite: bool [] on the same device; False: nothing changes.
    """

    master: Tensor
    grad: Tensor
    weight: Tensor
    ranges: tuple[HyperparamRange, ...]
    grad_scale: Tensor
    is_finite: Tensor

    def from_element(self, start: int) -> FlatUpdate:
        """Return the same step of the elements from `start` on."""
        ranges = (one for one in self.ranges if one.stop > start)
        return dataclasses.replace(
            self,
            master=self.master[start:],
            grad=self.grad[start:],
            weight=self.weight[start:],
            ranges=tuple(
                dataclasses.replace(one, start=max(one.start - start, 0), stop=one.stop - start)
                for one in ranges
            ),
        )

    @property
    def has_separate_weight(self) -> bool:
        """True if `weight` has memory of its own."""
        return self.weight.data_ptr() != self.master.data_ptr()
