"""What an update rule works on: flat tensors of one shard, place for place, and the runs in them that move alike."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class HyperparamRange:
    """Neighbouring elements, `start` to `stop`, with rates of their own."""

    start: int
    stop: int
    lr: float
    weight_decay: float
    eps_scale: float = 1.0
    """What Adam's eps is multiplied with."""

    @property
    def part(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True, kw_only=True)
class FlatUpdate:
    """One step of one shard, but for what a rule keeps beside the weights.

    Attributes:
        master: the wide weights, updated in place.
        grad: in the same dtype, or a narrower one.
        weight: gets the new `master` in its own dtype; it may be `master` itself.
        runs: tile the shard, in order.
        grad_scale: what gradients are multiplied with first: one number on their device, in the dtype of `master`.
        is_finite: one truth value there; where it is false, nothing changes.
    """

    master: Tensor
    grad: Tensor
    weight: Tensor
    runs: tuple[HyperparamRange, ...]
    grad_scale: Tensor
    is_finite: Tensor

    def behind(self, border: int) -> FlatUpdate:
        """The same step of the elements from `border` on."""
        runs = (run for run in self.runs if run.stop > border)
        return dataclasses.replace(
            self,
            master=self.master[border:],
            grad=self.grad[border:],
            weight=self.weight[border:],
            runs=tuple(
                dataclasses.replace(run, start=max(run.start - border, 0), stop=run.stop - border)
                for run in runs
            ),
        )

    @property
    def has_separate_weight(self) -> bool:
        """Whether `weight` has memory of its own."""
        return self.weight.data_ptr() != self.master.data_ptr()
